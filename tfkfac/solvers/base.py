"""Base class of solvers, and the row limit of row gradients."""

import abc
import math
from collections.abc import Mapping
from typing import TypeVar

import tensorflow as tf

from tfkfac.blocks import LayerGradient
from tfkfac.factors import Factor, Part, Side, Tensors

T = TypeVar("T")

Factors = Mapping[str, Factor]
"""Factor types of a block, by "A" and "G". Without "A", A is the identity."""

# Side of the gradient matrix W on which the inverse of a factor is multiplied,
# in the order of the products: A^-1 (W G^-1).
SIDES: dict[str, Side] = {"G": "right", "A": "left"}


class Solver(abc.ABC):
    """Decompose the factors of a block, and precondition its gradient.

    A decomposition is a mapping of tensors, its parts. The key of a tensor is
    the name of the factor, "A" or "G", and a suffix that the factor type
    defines.

    Spectral steps need a root R of the preconditioner, `R R^T`. Then `apply`
    transforms a gradient W by `R^T`, and `apply_back` a direction by `R`. For
    Kronecker factors these are `R_A^T W R_G` and `R_A Q R_G^T`. `change_root`
    converts the momentum, a sum of results of `apply`, at an inverse update.

    The methods of the built-in solvers also accept stacks: every tensor then
    has an additional first axis, over blocks with equal factors, and the
    damping has the shape of `means`, or sizes of 1. A registered solver is
    called for one block at a time.

    Args:
        name: Registered name, also the name of the section in saved state.
        by_roots: True to decompose into roots. Defaults to False.

    Attributes:
        whole_layers: True if one worker must decompose all factors of a layer.
        takes_rows: True if `apply` returns a row gradient for a row gradient.
    """

    whole_layers = False
    takes_rows = False

    def __init__(self, name: str, by_roots: bool = False) -> None:
        self.name = name
        self.by_roots = by_roots
        # Section of the decompositions in saved state.
        self.section = f"{name} roots" if by_roots else name

    @abc.abstractmethod
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        """Return specs of the tensors that `decompose` computes for one factor.

        Args:
            factors: Types of the block's factors.
            name: Name of the factor, "A" or "G".

        Returns:
            Shape and type of each part, by its name.
        """

    def kept(self, factors: Factors) -> dict[str, Part]:
        """Return specs of the stored tensors, the results of `combine`."""
        return self.all_parts(factors)

    def all_parts(self, factors: Factors) -> dict[str, Part]:
        """Return specs of the tensors that `decompose` computes in total."""
        return {
            key: spec
            for name in factors
            for key, spec in self.parts(factors, name).items()
        }

    @abc.abstractmethod
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        """Decompose the factors of a block that this worker owns.

        Args:
            factors: Types of the block's factors.
            values: Factors that this worker owns, by name.
            means: Mean eigenvalue of each factor of the block.
            damping: The damping, a scalar.

        Returns:
            The parts of these factors, by name.
        """

    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        """Combine the tensors of all factors into the stored decomposition."""
        return parts

    @abc.abstractmethod
    def apply(
        self, factors: Factors, decomposition: Tensors, gradient: LayerGradient
    ) -> LayerGradient:
        """Precondition a gradient; with `by_roots`, multiply it by `R^T`.

        Args:
            factors: Types of the block's factors.
            decomposition: Tensors by key; bfloat16 if stored in bfloat16.
            gradient: Gradient of the layer.

        Returns:
            The preconditioned gradient; with `by_roots`, `R^T` times it.
        """

    def apply_back(
        self, factors: Factors, decomposition: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        """Multiply a direction by the root R; for `by_roots` only.

        Args:
            factors: Types of the block's factors.
            decomposition: Tensors by key; bfloat16 if stored in bfloat16.
            matrix: Direction in the coordinates of the result of `apply`.
        """
        raise NotImplementedError

    def change_root(
        self, factors: Factors, old: Tensors, new: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        """Convert `R^T M` from the root R in `old` to the root in `new`.

        For solvers `by_roots` only. Without it, the matrix is not converted.
        """
        return matrix


def with_prefix(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Prefix each key, which is a suffix, with the name of the factor."""
    return {name + suffix: value for suffix, value in parts.items()}


def of_factor(name: str, tensors: Tensors) -> dict[str, tf.Tensor]:
    """Select the tensors of one factor, keyed by suffix."""
    return {
        key.removeprefix(name): tensor
        for key, tensor in tensors.items()
        if key == name or key.startswith(f"{name}_")
    }


def most_rows(factors: Factors, workers: int, has_product: bool = True) -> int:
    """Return the number of rows up to which a row gradient is cheaper.

    Let a block have `N` rows, `n` inputs and `m` outputs. The product of a
    vector with the inverse of A takes `p` multiplications, with G `q`.

    - row gradient: `N (p + q)` for P, `N^2 (n + m)` for `<P, W>`; with several
      workers, which sum their matrices, `N n m` for `<P, W>`
    - matrix gradient: `p m + q n`

    Forming `a^T g` costs the same in both cases. Without `has_product`, P is
    needed as a matrix, and neither W nor `<P, W>` is.
    """
    a, g = factors["A"], factors["G"]
    n, m, p, q = a.size, g.size, a.multiplications, g.multiplications
    matrix = p * m + q * n
    if not has_product:
        return matrix // (p + q)
    if workers > 1:
        return matrix // (p + q + n * m)
    discriminant_root = math.sqrt((p + q) ** 2 + 4 * (n + m) * matrix)
    return int((discriminant_root - (p + q)) / (2 * (n + m)))
