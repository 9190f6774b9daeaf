"""What a solver does: decompose factors now and then, apply them each step."""

import abc
import math
from collections.abc import Mapping

import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.linalg.symmetric import all_finite
from tfkfac.variables import state_variable

Tensors = Mapping[str, tf.Tensor]


class Solver(abc.ABC):
    """Turns factors and damping into a preconditioner.

    A factor is a matrix, a stack of matrices (groups), a vector (diagonal), or
    missing (the identity).
    """

    # A tensor of the decomposition that multiplies element by element.
    elementwise: str | None = None

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
    def decompose(self, factors: Tensors, damping: tf.Tensor) -> Tensors:
        """Computes the decomposition of a block's factors."""

    @abc.abstractmethod
    def apply(self, decomposition: Tensors, matrix: tf.Tensor) -> tf.Tensor:
        """Preconditions a gradient matrix `([groups,] inputs, outputs)`."""


class Decomposition(tf.Module):
    """The last good decomposition of one block.

    Args:
        solver: The solver.
        block: The block.
    """

    def __init__(self, solver: Solver, block: Block) -> None:
        super().__init__(name="decomposition")
        with tf.init_scope():
            initial = solver.initial(block)
        self.solver = solver
        self.names = tuple(initial)
        self.tensors = [
            state_variable(value, block.dtype, name)
            for name, value in initial.items()
        ]
        self.failures = state_variable(0, "int64", "failed_decompositions")

    def update(self, factors: Tensors, damping: tf.Tensor) -> tf.Tensor:
        """Decomposes anew; a result that is not finite is not taken.

        Returns:
            Scalar bool, False if the decomposition failed.
        """
        new = self.solver.decompose(factors, damping)
        good = all_finite([new[name] for name in self.names])
        for name, old in zip(self.names, self.tensors, strict=True):
            old.assign(tf.where(good, new[name], old))
        return good

    def apply(self, matrix: tf.Tensor) -> tf.Tensor:
        """Preconditions a gradient matrix."""
        tensors = dict(zip(self.names, self.tensors, strict=True))
        return self.solver.apply(tensors, matrix)


def decomposition_bytes(solver: Solver, block: Block) -> int:
    """Bytes of a block's decomposition."""
    sizes = [math.prod(shape) for shape in solver.shapes(block).values()]
    return sum(sizes) * block.dtype.size


def gradient_shape(block: Block) -> tuple[int, ...]:
    """Shape `([groups,] inputs, outputs)` of a block's gradient matrix."""
    shapes = block.factor_shapes
    *groups, outputs = shapes["G"][:-1]
    inputs = shapes["A"][-1] if "A" in shapes else 1
    return (*groups, inputs, outputs)
