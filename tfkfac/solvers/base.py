"""What a solver does: decompose factors now and then, apply them each step."""

import abc
from collections.abc import Mapping
from typing import TypeVar

import tensorflow as tf

from tfkfac.blocks import Block, LayerGradient
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.tracking import Tracked
from tfkfac.factors import Factor, Part, Side, Tensors
from tfkfac.linalg.symmetric import all_finite

T = TypeVar("T")

# The kinds of a block's factors by name, "A" missing for the identity.
Factors = Mapping[str, Factor]

# On which side of the gradient matrix a factor stands; G first.
SIDES: dict[str, Side] = {"G": "right", "A": "left"}


class Solver(abc.ABC):
    """Turns factors and damping into a preconditioner.

    The parts of a factor's decomposition are named after it, "A" or "G", and
    the suffix that its kind gives them.
    """

    @abc.abstractmethod
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        """Returns what `decompose` makes of one factor, by name."""

    @abc.abstractmethod
    def kept(self, factors: Factors) -> dict[str, Part]:
        """Returns the tensors of a block's decomposition, by name."""

    def all_parts(self, factors: Factors) -> dict[str, Part]:
        """Returns what `decompose` makes of all factors of a block."""
        return {
            part_name: part
            for name in factors
            for part_name, part in self.parts(factors, name).items()
        }

    def elements(self, factors: Factors) -> int:
        """Number of elements of a block's decomposition."""
        return sum(part.elements for part in self.kept(factors).values())

    @abc.abstractmethod
    def decompose(
        self,
        factors: Factors,
        name: str,
        value: tf.Tensor,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        """Decomposes one factor.

        Args:
            factors: The kinds of the block's factors.
            name: "A" or "G".
            value: The factor.
            means: Mean eigenvalue of each factor of the block.
            damping: The damping.

        Returns:
            The parts by name.
        """

    @abc.abstractmethod
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        """Makes the decomposition of a block of the parts of its factors."""

    @abc.abstractmethod
    def apply(
        self,
        factors: Factors,
        decomposition: Tensors,
        gradient: LayerGradient,
    ) -> tf.Tensor:
        """Preconditions the gradient of a layer.

        Args:
            factors: The kinds of the block's factors.
            decomposition: The tensors that are kept, by name.
            gradient: The gradient.

        Returns:
            The preconditioned gradient matrix.
        """


class Decomposition(Tracked):
    """The last good decomposition of one block; the identity at first.

    Args:
        solver: The solver.
        block: The block.
        dtype: Dtype of storage; None is that of the statistics.
    """

    def __init__(
        self, solver: Solver, block: Block, dtype: tf.DType | None = None
    ) -> None:
        super().__init__(name="decomposition")
        self.solver = solver
        self._block = block
        kept, stored = solver.kept(block.factors), dtype or block.dtype
        self.names = tuple(kept)
        with tf.init_scope():
            self.tensors = [
                state_variable(part.identity(stored), stored, name)
                for name, part in kept.items()
            ]
        self.failures = state_variable(0, "int64", "failed_decompositions")

    def update(self, parts: Tensors, damping: tf.Tensor) -> tf.Tensor:
        """Takes a new decomposition unless it is not finite.

        Args:
            parts: What the solver made of the block's factors.
            damping: The damping.

        Returns:
            Scalar bool, False if the decomposition failed.
        """
        new = self.solver.combine(parts, damping)
        stored = [
            tf.cast(new[name], old.dtype)
            for name, old in zip(self.names, self.tensors, strict=True)
        ]
        good = all_finite(stored)
        for value, old in zip(stored, self.tensors, strict=True):
            old.assign(tf.where(good, value, old))
        return good

    def apply(self, gradient: LayerGradient) -> tf.Tensor:
        """Preconditions the gradient of the layer; returns a matrix."""
        tensors = [self._block.cast(tensor) for tensor in self.tensors]
        named = dict(zip(self.names, tensors, strict=True))
        return self.solver.apply(self._block.factors, named, gradient)


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
