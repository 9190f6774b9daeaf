"""The implicit solver: eigen-decompositions with exact damping."""

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block
from tfkfac.linalg.symmetric import eigh, rounding
from tfkfac.solvers.base import Solver, Tensors, gradient_shape


class EigenSolver(Solver):
    """Preconditions with `(A (x) G + damping I)^-1` exactly.

    `P = Q_A [(Q_A^T W Q_G) * D] Q_G^T` with `D = 1 / (v_A v_G^T + damping)`
    (Distributed K-FAC, eq. 11-13). `D` is computed with the decomposition and
    kept (KAISA, section 4.4), so a new damping takes effect with the next one.
    """

    elementwise = "D"

    @override
    def shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        shapes = {
            name: shape
            for name, shape in block.factor_shapes.items()
            if len(shape) > 1
        }
        return shapes | {"D": gradient_shape(block)}

    @override
    def decompose(self, factors: Tensors, damping: tf.Tensor) -> Tensors:
        decomposition, values = {}, {}
        for name, factor in factors.items():
            if factor.shape.rank == 1:
                values[name] = tf.maximum(factor, 0)
            else:
                values[name], decomposition[name] = eigh(factor)
        outer = values["G"][..., None, :]
        if "A" in values:
            outer = values["A"][..., :, None] * outer
        damped = outer + tf.cast(damping, outer.dtype)
        # Without damping, null directions keep a floor relative to the
        # largest; a block of zeros is left as it is.
        largest = tf.reduce_max(damped, [-2, -1], keepdims=True)
        damped = tf.maximum(damped, rounding(outer.dtype) * largest)
        ones = tf.ones_like(damped)
        decomposition["D"] = 1 / tf.where(largest > 0, damped, ones)
        return decomposition

    @override
    def apply(self, decomposition: Tensors, matrix: tf.Tensor) -> tf.Tensor:
        q_a = decomposition.get("A")
        q_g = decomposition["G"]
        rotated = tf.matmul(matrix, q_g)
        if q_a is not None:
            rotated = tf.matmul(q_a, rotated, transpose_a=True)
        scaled = tf.matmul(rotated * decomposition["D"], q_g, transpose_b=True)
        return scaled if q_a is None else tf.matmul(q_a, scaled)
