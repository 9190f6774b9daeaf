"""A solver: it decomposes factors now and then, and applies them."""

import abc
import math
from collections.abc import Mapping
from typing import TypeVar

import tensorflow as tf

from tfkfac.blocks import LayerGradient
from tfkfac.factors import Factor, Part, Side, Tensors

T = TypeVar("T")

# The kinds of a block's factors by name, "A" missing for the identity.
Factors = Mapping[str, Factor]

# On which side of the gradient matrix a factor stands; G first.
SIDES: dict[str, Side] = {"G": "right", "A": "left"}


class Solver(abc.ABC):
    """Turns factors and damping into a preconditioner.

    A part of a decomposition is named by its factor, "A" or "G", and a suffix
    that the factor's class gives it.

    Args:
        name: Its registered name, also that of its section in saved state.

    Attributes:
        whole_layers: True if all factors of a layer must have one owner.
        takes_rows: True if `apply` returns a gradient of rows for one.
        is_explicit: True if the decomposition is an inverse, by which a
            gradient is multiplied once; False if it is an eigenbasis, into
            which a gradient is rotated and back.
    """

    whole_layers = False
    takes_rows = False
    is_explicit = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        """Returns what `decompose` makes of one factor, by name."""

    def kept(self, factors: Factors) -> dict[str, Part]:
        """Returns the tensors of a block's decomposition, by name."""
        return self.all_parts(factors)

    def all_parts(self, factors: Factors) -> dict[str, Part]:
        """Returns what `decompose` makes of all factors of a block."""
        return {
            part_name: part
            for name in factors
            for part_name, part in self.parts(factors, name).items()
        }

    @abc.abstractmethod
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        """Decomposes the factors of a block that a worker keeps.

        Args:
            factors: The kinds of the block's factors.
            values: The factors by name, all of them or some.
            means: Mean eigenvalue of each factor of the block.
            damping: The damping.

        Returns:
            The parts by name.
        """

    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        """Makes the decomposition of a block of the parts of its factors."""
        return parts

    @abc.abstractmethod
    def apply(
        self, factors: Factors, decomposition: Tensors, gradient: LayerGradient
    ) -> LayerGradient:
        """Preconditions the gradient of a layer.

        The tensors of the decomposition are in bfloat16 if they are kept so.
        """


def with_prefix(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Names the parts of one factor as those of a block."""
    return {name + suffix: part for suffix, part in parts.items()}


def of_factor(name: str, tensors: Tensors) -> dict[str, tf.Tensor]:
    """The parts of one factor among the tensors of a block, by suffix."""
    return {
        key.removeprefix(name): tensor
        for key, tensor in tensors.items()
        if key == name or key.startswith(f"{name}_")
    }


def most_rows(factors: Factors, workers: int) -> int:
    """The largest number of rows that take fewer products than the matrix.

    With `N` rows, `n` inputs, `m` outputs and `p`, `q` multiplications for the
    product of a vector with the inverse of A and of G, those are
    `N (p + q) + N^2 (n + m)`, the second for `<P, W>`, against `p m + q n`.
    (`a^T g` is formed once in either way.) Where several workers add up their
    matrices, `<P, W>` takes `N n m`. The block has both factors.
    """
    a, g = factors["A"], factors["G"]
    n, m, p, q = a.size, g.size, a.multiplications, g.multiplications
    matrix = p * m + q * n
    if workers > 1:
        return matrix // (p + q + n * m)
    root = math.sqrt((p + q) ** 2 + 4 * (n + m) * matrix)
    return int((root - (p + q)) / (2 * (n + m)))
