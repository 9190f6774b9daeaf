"""Eigen solver: eigendecompositions of the factors, exact damping."""

from collections.abc import Mapping
from typing import TypeVar

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient, MatrixGradient
from tfkfac.factors import VALUES, Part, Tensors
from tfkfac.linalg.tensors import rounding
from tfkfac.solvers.base import SIDES, Factors, Solver, of_factor, with_prefix

T = TypeVar("T")


class EigenSolver(Solver):
    """Precondition with `(A (x) G + damping I)^-1`, without approximation.

    `P = Q_A [(Q_A^T W Q_G) * D] Q_G^T` with `D = 1 / (v_A v_G^T + damping)`
    (Distributed K-FAC, eq. 11-13). `D` is computed and stored with the
    decomposition (KAISA, section 4.4). A new damping takes effect at the next
    decomposition. With `by_roots`, D is its square root: R is symmetric.
    """

    @override
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        return with_prefix(name, factors[name].eigen_parts())

    @override
    def kept(self, factors: Factors) -> dict[str, Part]:
        specs = self.all_parts(factors)
        return without_values(specs) | outer_part(specs)

    @override
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        tensors: dict[str, tf.Tensor] = {}
        for name, value in values.items():
            tensors |= with_prefix(name, factors[name].eigen(value))
        return tensors

    @override
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        outer = parts["G" + VALUES][..., None, :]
        if "A" + VALUES in parts:
            outer = parts["A" + VALUES][..., :, None] * outer
        damped = outer + tf.cast(damping, outer.dtype)[..., None, None]
        # Bound the condition number, in case the damping is 0. Set D = 1 for a
        # block of zeros.
        largest = tf.reduce_max(damped, [-2, -1], keepdims=True)
        damped = tf.maximum(damped, rounding(outer.dtype) * largest)
        damped = tf.where(largest == 0, tf.ones_like(damped), damped)
        D = tf.math.rsqrt(damped) if self.by_roots else 1 / damped
        return without_values(parts) | {"D": D}

    @override
    def apply(
        self, factors: Factors, decomposition: Tensors, gradient: LayerGradient
    ) -> LayerGradient:
        sides = {name: side for name, side in SIDES.items() if name in factors}
        matrix = gradient.matrix
        # Cast bfloat16 to the gradient's dtype: D can amplify rounding errors.
        casts = {k: tf.cast(t, matrix.dtype) for k, t in decomposition.items()}
        bases = {name: of_factor(name, casts) for name in sides}
        D = casts["D"]
        for name, side in sides.items():
            matrix = factors[name].rotate(bases[name], matrix, side)
            D = factors[name].widen(D, side)
        matrix = matrix * D
        for name, side in sides.items():
            matrix = factors[name].rotate(bases[name], matrix, side, back=True)
        return MatrixGradient(matrix)

    @override
    def apply_back(
        self, factors: Factors, decomposition: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        return self.apply(factors, decomposition, MatrixGradient(matrix)).matrix

    @override
    def change_root(
        self, factors: Factors, old: Tensors, new: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        inverse = {**old, "D": 1 / tf.cast(old["D"], matrix.dtype)}
        matrix = self.apply_back(factors, inverse, matrix)
        return self.apply(factors, new, MatrixGradient(matrix)).matrix


def outer_part(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return the spec of `D`, with shape `(..., inputs, outputs)`."""
    *stack, outputs = parts["G" + VALUES].shape
    inputs = parts["A" + VALUES].shape[-1] if "A" + VALUES in parts else 1
    return {"D": Part((*stack, inputs, outputs))}


def without_values(parts: Mapping[str, T]) -> dict[str, T]:
    """Remove the eigenvalues, which are stored only within `D`."""
    return {k: value for k, value in parts.items() if not k.endswith(VALUES)}
