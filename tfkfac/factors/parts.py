"""A tensor of a factor or of its decomposition: its shape, and what travels."""

import dataclasses
import math

import tensorflow as tf
from typing_extensions import override

from tfkfac.linalg.symmetric import pack, packed_size, unpack


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor that acts element by element; all of it travels.

    Attributes:
        shape: Its shape.
    """

    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements that are kept."""
        return math.prod(self.shape)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of what `pack` returns."""
        return self.shape

    def pack(self, value: tf.Tensor) -> tf.Tensor:
        """Leaves out what a receiver can tell from the rest."""
        return value

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return packed

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of what `largest` returns."""
        return (1,) * len(self.shape)

    def largest(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the largest absolute entry, in a shape to divide by."""
        return tf.reduce_max(tf.abs(value), keepdims=True)

    def identity(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the value that leaves a gradient as it is."""
        return tf.ones(self.shape, dtype)


@dataclasses.dataclass(frozen=True)
class MatrixPart(Part):
    """Matrices `(..., n, m)` that a gradient is multiplied with.

    Attributes:
        shape: Its shape.
        symmetric: Whether a triangle tells the rest.
    """

    symmetric: bool = False

    @property
    @override
    def packed_shape(self) -> tuple[int, ...]:
        return (packed_size(self.shape),) if self.symmetric else self.shape

    @override
    def pack(self, value: tf.Tensor) -> tf.Tensor:
        return pack(value) if self.symmetric else value

    @override
    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        return unpack(packed, self.shape) if self.symmetric else packed

    @property
    @override
    def scale_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], 1, 1)

    @override
    def largest(self, value: tf.Tensor) -> tf.Tensor:
        """One for each matrix: those of a stack may be of any size."""
        return tf.reduce_max(tf.abs(value), [-2, -1], keepdims=True)

    @override
    def identity(self, dtype: tf.DType) -> tf.Tensor:
        *stack, rows, columns = self.shape
        return tf.eye(rows, columns, batch_shape=stack, dtype=dtype)
