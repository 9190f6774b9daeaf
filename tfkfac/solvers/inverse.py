"""Inverse solver: inverses of the damped factors, or their Cholesky roots."""

import functools

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient, MatrixGradient, RowGradient
from tfkfac.compat.functions import shared_call
from tfkfac.compat.graphs import in_xla
from tfkfac.factors import Part, Side, Tensors
from tfkfac.solvers.base import SIDES, Factors, Solver, of_factor, with_prefix

# Bound of `pi`: beyond it the damping dominates the smaller factor.
_MAX_PI = 1e6


class InverseSolver(Solver):
    """Precondition with `(A + pi sqrt(d) I)^-1 W (G + sqrt(d)/pi I)^-1`.

    `d` is the damping; `pi^2` is the ratio of the mean eigenvalues of A and G
    (Martens & Grosse, 2015, section 6.3; DP-KFAC, eq. 14). A block without A
    is preconditioned with `(G + d I)^-1`.
    """

    takes_rows = True

    @override
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        factor = factors[name]
        specs = factor.root_parts() if self.by_roots else factor.inverse_parts()
        return with_prefix(name, specs)

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
            shift = self.share(name, means, tf.cast(damping, value.dtype))
            factor = factors[name]
            decompose = factor.root if self.by_roots else factor.inverse
            tensors |= with_prefix(name, decompose(value, shift))
        return tensors

    def share(self, name: str, means: Tensors, damping: tf.Tensor) -> tf.Tensor:
        """Return the damping that is added to the eigenvalues of one factor.

        Args:
            name: Name of the factor, "A" or "G".
            means: Mean eigenvalue of each factor of the block.
            damping: Damping of the block, a scalar.
        """
        if "A" not in means:
            return damping
        key = None if in_xla() else "balance"
        pi = shared_call(key, balance, means["A"], means["G"], any_size=True)
        root = tf.sqrt(damping)
        return pi * root if name == "A" else root / pi

    @override
    def apply(
        self, factors: Factors, decomposition: Tensors, gradient: LayerGradient
    ) -> LayerGradient:
        times = functools.partial(self._times, factors, decomposition)
        if isinstance(gradient, RowGradient):
            return RowGradient(
                times("A", gradient.a, "right"), times("G", gradient.g, "right")
            )
        matrix = gradient.matrix
        for name, side in SIDES.items():
            if name in factors:
                matrix = times(name, matrix, side)
        return MatrixGradient(matrix)

    @override
    def apply_back(
        self, factors: Factors, decomposition: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        times = functools.partial(self._times, factors, decomposition)
        for name, side in SIDES.items():
            if name in factors:
                matrix = times(name, matrix, side, back=True)
        return matrix

    @override
    def change_root(
        self, factors: Factors, old: Tensors, new: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        for name, factor in factors.items():
            root = factor.for_products(of_factor(name, old), matrix.dtype)
            matrix = factor.divide_root(root, matrix, SIDES[name])
        return self.apply(factors, new, MatrixGradient(matrix)).matrix

    def _times(
        self,
        factors: Factors,
        decomposition: Tensors,
        name: str,
        matrix: tf.Tensor,
        side: Side,
        back: bool = False,
    ) -> tf.Tensor:
        """Multiply a matrix by the inverse of one factor, or by its root."""
        factor, tensors = factors[name], of_factor(name, decomposition)
        inverse = factor.for_products(tensors, matrix.dtype)
        if self.by_roots:
            return factor.multiply_root(inverse, matrix, side, back)
        return factor.multiply(inverse, matrix, side)


def balance(mean_a: tf.Tensor, mean_g: tf.Tensor) -> tf.Tensor:
    """Return `pi` within [1 / _MAX_PI, _MAX_PI]; 1 if a factor is zero."""
    pi = tf.sqrt(tf.math.divide_no_nan(mean_a, mean_g))
    pi = tf.where(mean_g > 0, pi, tf.ones_like(pi))
    pi = tf.where(mean_a > 0, pi, tf.ones_like(pi))
    return tf.clip_by_value(pi, 1 / _MAX_PI, _MAX_PI)
