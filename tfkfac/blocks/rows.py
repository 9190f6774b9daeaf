"""Rows of a layer (inputs and pre-activation gradients), and its gradient."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import tensorflow as tf
from typing_extensions import override

from tfkfac.linalg.tensors import select


class Statistic(NamedTuple):
    """A mean over rows of which other workers have some.

    Attributes:
        total: The sum over the rows that are here.
        count: The divisor of the sum.
    """

    total: tf.Tensor
    count: tf.Tensor


class Rows:
    """Inputs and pre-activation gradients as rows.

    Args:
        a: Inputs `(batch, shared, [groups,] inputs)`, the bias' 1 included;
            for an embedding the integer tokens `(batch, shared)`; None
            for a block without factor A. Or a function that makes them, for
            those that are large and often not needed.
        g: Gradients `(batch, shared, [groups,] outputs)`.
        mask: Bool `(batch, shared)`, False where padded, or None.
        gram: A function that makes the sum of `a a^T` over all rows without
            them, and their number. Defaults to None: there is no other way.
    """

    def __init__(
        self,
        a: tf.Tensor | Callable[[], tf.Tensor] | None,
        g: tf.Tensor,
        mask: tf.Tensor | None,
        gram: Callable[[], Statistic] | None = None,
    ) -> None:
        self._a = a
        self.g = g
        self.mask = mask
        self.gram = gram

    @property
    def a(self) -> tf.Tensor | None:
        """The inputs."""
        if callable(self._a):
            self._a = self._a()
        return self._a


def weigh(
    a: tf.Tensor, weights: tf.Tensor | None, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Zeroes the rows that carry no loss and counts the others."""
    if weights is None:
        features = a.shape[2:].num_elements()
        if features:
            return a, tf.cast(tf.size(a, tf.int64) // features, dtype)
        return a, tf.cast(tf.reduce_prod(tf.shape(a)[:2]), dtype)
    extra = [1] * (a.shape.rank - 2)
    shape = tf.concat([tf.shape(weights), extra], 0)
    # Not a product: a padded row may hold anything, NaN included.
    a = tf.where(tf.reshape(weights, shape) > 0, a, tf.zeros_like(a))
    return a, tf.reduce_sum(weights)


def average_positions(
    a: tf.Tensor, weights: tf.Tensor | None, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean over the positions of each example, and the examples."""
    if weights is None:
        return (
            tf.reduce_mean(a, 1, keepdims=True),
            tf.cast(tf.shape(a)[0], dtype),
        )
    positions = tf.reduce_sum(weights, 1)
    extra = [1] * (a.shape.rank - 1)
    shape = tf.concat([tf.shape(positions), extra], 0)
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(a, 1, keepdims=True), tf.reshape(positions, shape)
    )
    return mean, tf.reduce_sum(tf.cast(positions > 0, dtype))


def fold_positions(tensor: tf.Tensor) -> tf.Tensor:
    """Reshapes `(batch, ..., features)` to `(batch, shared, features)`.

    Args:
        tensor: The tensor, of two axes at least.
    """
    if tensor.shape.rank == 2:
        return tf.expand_dims(tensor, 1)
    return fold_axes(tensor, tensor.shape.rank - 2, size_of(tensor, -1))


def size_of(tensor: tf.Tensor, axis: int) -> Any:
    """Size of an axis, a Python integer if it is known."""
    known = tensor.shape[axis]
    # Taken apart, as an index would be three constants for each of them.
    return tf.unstack(tf.shape(tensor))[axis] if known is None else known


def with_shape(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Reshapes a tensor that has not that shape already."""
    if tensor.shape.as_list() == list(shape):
        return tensor
    return tf.reshape(tensor, shape)


def fold_axes(tensor: tf.Tensor, shared: int, features: Any) -> tf.Tensor:
    """`(batch, shared..., features...)` to `(batch, shared, features)`."""
    positions = tensor.shape[1 : 1 + shared].num_elements()
    if positions:
        return tf.reshape(tensor, [-1, positions, features])
    # Not -1 for both: an empty batch leaves the number of positions open.
    batch, *sizes = tf.unstack(tf.shape(tensor))[: 1 + shared]
    return tf.reshape(tensor, [batch, math.prod(sizes), features])


def fold_mask(mask: tf.Tensor | None, shape: tf.Tensor) -> tf.Tensor | None:
    """Spreads a mask of the leading dimensions over `(batch, shared)`.

    Args:
        mask: Bool of shape `(batch, ...)`, or None.
        shape: Dynamic shape `(batch, ...)` of the positions.
    """
    if mask is None or mask.shape.rank is None:
        return None
    missing = shape.shape[0] - mask.shape.rank
    if missing < 0:
        return None
    mask = tf.reshape(mask, tf.concat([tf.shape(mask), [1] * missing], 0))
    mask = tf.broadcast_to(tf.cast(mask, tf.bool), shape)
    return tf.reshape(mask, [shape[0], tf.reduce_prod(shape[1:])])


class LayerGradient(abc.ABC):
    """The gradient of a layer's weights, or what a solver made of it."""

    @property
    @abc.abstractmethod
    def matrix(self) -> tf.Tensor:
        """The gradient written out, `([groups,] inputs, outputs)`."""

    @abc.abstractmethod
    def scaled(self, factor: tf.Tensor) -> Self:
        """The gradient times a number."""

    @abc.abstractmethod
    def inner(self, other: "LayerGradient") -> tf.Tensor:
        """The inner product of two gradients as matrices."""

    @abc.abstractmethod
    def bound(self) -> tf.Tensor:
        """A number of at least half the squared norm of the matrix."""

    @abc.abstractmethod
    def where(self, flag: tf.Tensor, otherwise: Self) -> Self:
        """The gradient if a scalar bool is true, or another of its form."""


@dataclasses.dataclass(frozen=True)
class MatrixGradient(LayerGradient):
    """A gradient that is written out.

    Attributes:
        value: The matrix, `([groups,] inputs, outputs)`.
    """

    value: tf.Tensor

    @property
    @override
    def matrix(self) -> tf.Tensor:
        return self.value

    @override
    def scaled(self, factor: tf.Tensor) -> "MatrixGradient":
        return MatrixGradient(self.value * tf.cast(factor, self.value.dtype))

    @override
    def inner(self, other: LayerGradient) -> tf.Tensor:
        return tf.reduce_sum(self.value * other.matrix)

    @override
    def bound(self) -> tf.Tensor:
        return tf.nn.l2_loss(self.value)

    @override
    def where(
        self, flag: tf.Tensor, otherwise: "MatrixGradient"
    ) -> "MatrixGradient":
        return MatrixGradient(select(flag, self.value, otherwise.value))


@dataclasses.dataclass(frozen=True)
class RowGradient(LayerGradient):
    """A gradient `a^T g` that nobody has written out.

    With fewer rows than the layer has features, it takes fewer operations to
    multiply the rows with inverses of the factors than the matrix:
    `A^-1 a^T g G^-1 = (a A^-1)^T (g G^-1)`.

    Attributes:
        a: The inputs, `(rows, inputs)`, the bias' 1 included.
        g: The gradients at the pre-activation, `(rows, outputs)`.
    """

    a: tf.Tensor
    g: tf.Tensor

    @property
    @override
    def matrix(self) -> tf.Tensor:
        return tf.matmul(self.a, self.g, transpose_a=True)

    @override
    def scaled(self, factor: tf.Tensor) -> "RowGradient":
        return RowGradient(self.a, self.g * tf.cast(factor, self.g.dtype))

    @override
    def inner(self, other: LayerGradient) -> tf.Tensor:
        if isinstance(other, RowGradient):
            along = tf.matmul(self.a, other.a, transpose_b=True)
            return tf.reduce_sum(
                along * tf.matmul(self.g, other.g, transpose_b=True)
            )
        return tf.reduce_sum(tf.matmul(self.a, other.matrix) * self.g)

    @override
    def bound(self) -> tf.Tensor:
        return 2 * tf.nn.l2_loss(self.a) * tf.nn.l2_loss(self.g)

    @override
    def where(self, flag: tf.Tensor, otherwise: "RowGradient") -> "RowGradient":
        return RowGradient(
            select(flag, self.a, otherwise.a),
            select(flag, self.g, otherwise.g),
        )
