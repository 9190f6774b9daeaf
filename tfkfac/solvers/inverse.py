"""The explicit solver: factored damping and inverses by Cholesky."""

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block
from tfkfac.linalg.symmetric import damped_inverse, rounding
from tfkfac.solvers.base import Solver, Tensors

# Beyond this ratio a factor is noise beside its damping.
_LARGEST_PI = 1e6


class InverseSolver(Solver):
    """Preconditions with `(A + pi sqrt(d) I)^-1 W (G + sqrt(d)/pi I)^-1`.

    `pi^2` is the ratio of the factors' mean eigenvalues (Martens & Grosse,
    2015, section 6.3; DP-KFAC, eq. 14). A block without A is damped exactly.
    """

    symmetric_parts = True

    @override
    def parts(self, block: Block, name: str) -> dict[str, tuple[int, ...]]:
        return {name: block.factor_shapes[name]}

    @override
    def shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        return block.factor_shapes

    @override
    def decompose(
        self, name: str, factor: tf.Tensor, means: Tensors, damping: tf.Tensor
    ) -> Tensors:
        damping = tf.cast(damping, factor.dtype)
        if "A" not in means:
            damping = tf.broadcast_to(damping, tf.shape(factor)[:-2])
            return {name: damped_inverse(factor, damping)}
        pi = balance(means["A"], means["G"])
        root = tf.sqrt(damping)
        return {name: invert(factor, pi * root if name == "A" else root / pi)}

    @override
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        return parts

    @override
    def apply(self, decomposition: Tensors, matrix: tf.Tensor) -> tf.Tensor:
        a = decomposition.get("A")
        matrix = tf.matmul(matrix, decomposition["G"])
        if a is None:
            return matrix
        if a.shape.rank == 1:
            return a[:, None] * matrix
        return tf.matmul(a, matrix)


def balance(mean_a: tf.Tensor, mean_g: tf.Tensor) -> tf.Tensor:
    """`pi`, kept within bounds so that a vanishing factor does no harm."""
    ratio = tf.sqrt(tf.math.divide_no_nan(mean_a, mean_g))
    ratio = tf.where(mean_g > 0, ratio, tf.ones_like(ratio))
    ratio = tf.where(mean_a > 0, ratio, tf.ones_like(ratio))
    return tf.clip_by_value(ratio, 1 / _LARGEST_PI, _LARGEST_PI)


def invert(factor: tf.Tensor, damping: tf.Tensor) -> tf.Tensor:
    """`(F + damping I)^-1` of matrices or of one diagonal."""
    if factor.shape.rank > 1:
        return damped_inverse(factor, damping)
    floor = rounding(factor.dtype) * tf.reduce_max(factor)
    shift = tf.maximum(damping, floor)
    return 1 / (factor + tf.where(shift > 0, shift, tf.ones_like(shift)))
