"""Solvers as the papers print them, registered on import.

    from experiments import printed
    model.compile(tfkfac.KFAC(0.1, solver="plain_inverse"), loss)

Both lose to the built-in solvers: "plain_inverse" in accuracy
(`distributed-kfac-table-1` in docs/pages/results.md), "eigen_outer" in bytes
that are sent. They show how `tfkfac.register_solver` is used.
"""

import tensorflow as tf
from typing_extensions import override

import tfkfac
from tfkfac.factors import Part, Tensors
from tfkfac.solvers import EigenSolver, Factors, InverseSolver
from tfkfac.solvers.eigen import outer_part, without_values


class PlainInverseSolver(InverseSolver):
    """Precondition with `(A + damping I)^-1 W (G + damping I)^-1`.

    The explicit inverses of Distributed K-FAC (eq. 9 and 10) as printed: the
    whole damping is added to both factors. A factor much smaller than the
    damping, such as G late in training, has no effect.
    """

    @override
    def share(self, name: str, means: Tensors, damping: tf.Tensor) -> tf.Tensor:
        return damping


class OuterEigenSolver(EigenSolver):
    """`EigenSolver` whose owner of a layer computes `D` and sends it.

    As printed in KAISA (section 4.4): the gradient workers receive the matrix
    `D` in place of the two vectors of eigenvalues, which takes more bytes.
    """

    whole_layers = True

    @override
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        parts = super().parts(factors, name)
        if name == "A":
            return without_values(parts)
        both = parts | super().parts(factors, "A") if "A" in factors else parts
        return without_values(parts) | outer_part(both)

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


tfkfac.register_solver("plain_inverse", PlainInverseSolver)
tfkfac.register_solver("eigen_outer", OuterEigenSolver)
