"""Variants of the solvers as the papers print them, to compare with."""

import tensorflow as tf
from typing_extensions import override

from tfkfac.factors import Part, Tensors
from tfkfac.solvers.base import Factors
from tfkfac.solvers.eigen import EigenSolver, outer_part, without_values
from tfkfac.solvers.inverse import InverseSolver


class PlainInverseSolver(InverseSolver):
    """Preconditions with `(A + damping I)^-1 W (G + damping I)^-1`.

    The explicit inverses of Distributed K-FAC (eq. 9 and 10) as printed: both
    factors get the whole damping, whatever their sizes. It is not the damping
    of `A (x) G`, and where one factor is much smaller than the other, as G is
    late in training, it is lost beside it.
    """

    name = "plain_inverse"

    @override
    def share(self, name: str, means: Tensors, damping: tf.Tensor) -> tf.Tensor:
        return damping


class OuterEigenSolver(EigenSolver):
    """`EigenSolver` with `D` made where G is decomposed, and sent.

    As printed in KAISA (section 4.4): the gradient workers get the matrix
    `D` in place of the two vectors of eigenvalues, and have nothing left to
    compute of it. It is much more to send.
    """

    name = "eigen_outer"
    whole_layers = True

    @override
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        parts = super().parts(factors, name)
        if name == "A":
            return without_values(parts)
        every = parts | super().parts(factors, "A") if "A" in factors else parts
        return without_values(parts) | outer_part(every)

    @override
    def kept(self, factors: Factors) -> dict[str, Part]:
        return self.all_parts(factors)

    @override
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        parts = super().decompose(factors, values, means, damping)
        return super().combine(parts, damping)

    @override
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        return parts
