"""The explicit solvers: inverses of damped factors, by Cholesky."""

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient, MatrixGradient, RowGradient
from tfkfac.factors import Part, Side, Tensors
from tfkfac.solvers.base import SIDES, Factors, Solver, of_factor, with_prefix

# Beyond this ratio a factor is noise beside its damping.
_LARGEST_PI = 1e6


class InverseSolver(Solver):
    """Preconditions with `(A + pi sqrt(d) I)^-1 W (G + sqrt(d)/pi I)^-1`.

    `pi^2` is the ratio of the factors' mean eigenvalues (Martens & Grosse,
    2015, section 6.3; DP-KFAC, eq. 14). A block without A is damped exactly.
    """

    takes_rows = True
    is_explicit = True

    @override
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        return with_prefix(name, factors[name].inverse_parts())

    @override
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        parts: dict[str, tf.Tensor] = {}
        for name, value in values.items():
            share = self.share(name, means, tf.cast(damping, value.dtype))
            parts |= with_prefix(name, factors[name].inverse(value, share))
        return parts

    def share(self, name: str, means: Tensors, damping: tf.Tensor) -> tf.Tensor:
        """Damping of one factor, added to its eigenvalues."""
        if "A" not in means:
            return damping
        pi, root = balance(means["A"], means["G"]), tf.sqrt(damping)
        return pi * root if name == "A" else root / pi

    @override
    def apply(
        self, factors: Factors, decomposition: Tensors, gradient: LayerGradient
    ) -> LayerGradient:

        def times(name: str, matrix: tf.Tensor, side: Side) -> tf.Tensor:
            factor, parts = factors[name], of_factor(name, decomposition)
            inverse = factor.for_products(parts, matrix.dtype)
            return factor.multiply(inverse, matrix, side)

        if isinstance(gradient, RowGradient):
            return RowGradient(
                times("A", gradient.a, "right"), times("G", gradient.g, "right")
            )
        matrix = gradient.matrix
        for name, side in SIDES.items():
            if name in factors:
                matrix = times(name, matrix, side)
        return MatrixGradient(matrix)


def balance(mean_a: tf.Tensor, mean_g: tf.Tensor) -> tf.Tensor:
    """`pi`, kept within bounds so that a vanishing factor does no harm."""
    ratio = tf.sqrt(tf.math.divide_no_nan(mean_a, mean_g))
    ratio = tf.where(mean_g > 0, ratio, tf.ones_like(ratio))
    ratio = tf.where(mean_a > 0, ratio, tf.ones_like(ratio))
    return tf.clip_by_value(ratio, 1 / _LARGEST_PI, _LARGEST_PI)
