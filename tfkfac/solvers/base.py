"""What a solver does: decompose factors now and then, apply them each step."""

import abc
import math
from collections.abc import Mapping

import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.compat.graphs import state_variable
from tfkfac.linalg.symmetric import all_finite

Tensors = Mapping[str, tf.Tensor]


class Solver(abc.ABC):
    """Turns factors and damping into a preconditioner.

    A factor is a matrix, a stack of matrices (groups), a vector (diagonal), or
    missing (the identity).
    """

    # A tensor of the decomposition that multiplies element by element.
    elementwise: str | None = None
    # Whether the parts made of a symmetric factor are symmetric too.
    symmetric_parts = False

    @abc.abstractmethod
    def shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors of a block's decomposition."""

    def initial(self, block: Block) -> dict[str, tf.Tensor]:
        """Returns the decomposition that preconditions with the identity."""
        initial = {}
        for name, shape in self.shapes(block).items():
            if name == self.elementwise or len(shape) == 1:
                initial[name] = tf.ones(shape, block.dtype)
            else:
                initial[name] = tf.eye(
                    shape[-1], batch_shape=shape[:-2], dtype=block.dtype
                )
        return initial

    @abc.abstractmethod
    def parts(self, block: Block, name: str) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of what `decompose` makes of one factor."""

    @abc.abstractmethod
    def decompose(
        self, name: str, factor: tf.Tensor, means: Tensors, damping: tf.Tensor
    ) -> Tensors:
        """Decomposes one factor.

        Args:
            name: "A" or "G".
            factor: The factor.
            means: Mean eigenvalue of each factor of the block.
            damping: The damping.

        Returns:
            The parts by name.
        """

    @abc.abstractmethod
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        """Makes the decomposition of a block of the parts of its factors."""

    @abc.abstractmethod
    def apply(self, decomposition: Tensors, matrix: tf.Tensor) -> tf.Tensor:
        """Preconditions a gradient matrix `([groups,] inputs, outputs)`."""


class Decomposition(tf.Module):
    """The last good decomposition of one block.

    Args:
        solver: The solver.
        block: The block.
        dtype: Dtype of storage; None is that of the statistics.
    """

    def __init__(
        self, solver: Solver, block: Block, dtype: tf.DType | None = None
    ) -> None:
        super().__init__(name="decomposition")
        with tf.init_scope():
            initial = solver.initial(block)
        self.solver = solver
        self._dtype = block.dtype
        self.names = tuple(initial)
        self.tensors = [
            state_variable(value, dtype or block.dtype, name)
            for name, value in initial.items()
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

    def apply(self, matrix: tf.Tensor) -> tf.Tensor:
        """Preconditions a gradient matrix."""
        tensors = [tf.cast(tensor, self._dtype) for tensor in self.tensors]
        named = dict(zip(self.names, tensors, strict=True))
        return self.solver.apply(named, matrix)


def decomposition_bytes(
    solver: Solver, block: Block, dtype: tf.DType | None = None
) -> int:
    """Bytes of a block's decomposition in storage."""
    sizes = [math.prod(shape) for shape in solver.shapes(block).values()]
    return sum(sizes) * (dtype or block.dtype).size


def gradient_shape(block: Block) -> tuple[int, ...]:
    """Shape `([groups,] inputs, outputs)` of a block's gradient matrix."""
    shapes = block.factor_shapes
    *groups, outputs = shapes["G"][:-1]
    inputs = shapes["A"][-1] if "A" in shapes else 1
    return (*groups, inputs, outputs)
