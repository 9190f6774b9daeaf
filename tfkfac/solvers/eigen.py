"""The implicit solver: eigen-decompositions with exact damping."""

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block
from tfkfac.linalg.symmetric import eigh, rounding
from tfkfac.solvers.base import Solver, Tensors, gradient_shape

# Suffix of the name of a factor's eigenvalues.
_VALUES = "_values"


class EigenSolver(Solver):
    """Preconditions with `(A (x) G + damping I)^-1` exactly.

    `P = Q_A [(Q_A^T W Q_G) * D] Q_G^T` with `D = 1 / (v_A v_G^T + damping)`
    (Distributed K-FAC, eq. 11-13). `D` is computed with the decomposition and
    kept (KAISA, section 4.4), so a new damping takes effect with the next one.
    """

    elementwise = "D"

    @override
    def parts(self, block: Block, name: str) -> dict[str, tuple[int, ...]]:
        shape = block.factor_shapes[name]
        values = {name + _VALUES: shape[:1] if len(shape) == 1 else shape[:-1]}
        return values if len(shape) == 1 else {name: shape, **values}

    @override
    def shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        shapes = {
            name: shape
            for name, shape in block.factor_shapes.items()
            if len(shape) > 1
        }
        return shapes | {"D": gradient_shape(block)}

    @override
    def decompose(
        self, name: str, factor: tf.Tensor, means: Tensors, damping: tf.Tensor
    ) -> Tensors:
        if factor.shape.rank == 1:
            return {name + _VALUES: tf.maximum(factor, 0)}
        values, vectors = eigh(factor)
        return {name: vectors, name + _VALUES: values}

    @override
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        outer = parts["G" + _VALUES][..., None, :]
        if "A" + _VALUES in parts:
            outer = parts["A" + _VALUES][..., :, None] * outer
        damped = outer + tf.cast(damping, outer.dtype)
        # Without damping, null directions keep a floor relative to the
        # largest; a block of zeros is left as it is.
        largest = tf.reduce_max(damped, [-2, -1], keepdims=True)
        damped = tf.maximum(damped, rounding(outer.dtype) * largest)
        damped = tf.where(largest == 0, tf.ones_like(damped), damped)
        vectors = {k: v for k, v in parts.items() if not k.endswith(_VALUES)}
        return {**vectors, "D": 1 / damped}

    @override
    def apply(self, decomposition: Tensors, matrix: tf.Tensor) -> tf.Tensor:
        q_a = decomposition.get("A")
        q_g = decomposition["G"]
        rotated = tf.matmul(matrix, q_g)
        if q_a is not None:
            rotated = tf.matmul(q_a, rotated, transpose_a=True)
        scaled = tf.matmul(rotated * decomposition["D"], q_g, transpose_b=True)
        return scaled if q_a is None else tf.matmul(q_a, scaled)
