"""Rows of a layer (inputs and output gradients), and weight gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.linalg.tensors import (
    row_squares,
    row_sums,
    select,
    size_of,
    unstacked,
)


class Statistic(NamedTuple):
    """Mean over rows, stored as sum and count to add up over workers.

    Attributes:
        total: Sum over the local rows.
        count: Divisor. The mean is `sum(total) / sum(count)` over workers.
    """

    total: tf.Tensor
    count: tf.Tensor


class Rows:
    """Inputs and pre-activation gradients of a layer call.

    Args:
        a: Inputs `(batch, shared, [groups,] inputs)`, with a column of ones
            for the bias. For an embedding, integer tokens `(batch, shared)`.
            None for a block without factor A. A function that returns the
            inputs delays a large computation until it is needed.
        g: Gradients `(batch, shared, [groups,] outputs)`. Like the inputs, they
            may be `Patches` in place of a tensor.
        mask: Bool `(batch, shared)`, False for padding; or None.
        gram: Function that returns the sum of `a a^T` over all rows and their
            number without computing `a`. Defaults to None.
    """

    def __init__(
        self,
        a: Any,
        g: Any,
        mask: tf.Tensor | None,
        gram: Callable[[], Statistic] | None = None,
    ) -> None:
        self._a = a
        self.g = g
        self.mask = mask
        self.gram = gram

    @property
    def a(self) -> Any:
        """Inputs, computed at the first use."""
        if callable(self._a):
            self._a = self._a()
        return self._a


def weigh(
    a: tf.Tensor, weights: tf.Tensor | None, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Set rows of weight 0 to zero and count the other rows."""
    if weights is None:
        features = a.shape[2:].num_elements()
        if features:
            return a, tf.cast(tf.size(a, tf.int64) // features, dtype)
        return a, tf.cast(tf.reduce_prod(tf.shape(a)[:2]), dtype)
    shape = tf.concat([tf.shape(weights), [1] * (a.shape.rank - 2)], 0)
    # Select rather than multiply by 0: a padded row may contain NaN.
    a = tf.where(tf.reshape(weights, shape) > 0, a, tf.zeros_like(a))
    return a, tf.reduce_sum(weights)


def fold_positions(tensor: tf.Tensor) -> tf.Tensor:
    """Reshape `(batch, ..., features)` to `(batch, shared, features)`.

    Args:
        tensor: A tensor of rank 2 or more.
    """
    if tensor.shape.rank == 2:
        return tf.expand_dims(tensor, 1)
    return fold_axes(tensor, tensor.shape.rank - 2, size_of(tensor, -1))


def with_shape(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Reshape a tensor unless its static shape is `shape` already."""
    if tensor.shape.as_list() == list(shape):
        return tensor
    return tf.reshape(tensor, shape)


def fold_axes(tensor: tf.Tensor, shared: int, features: Any) -> tf.Tensor:
    """Reshape to `(batch, positions, features)`; merge `shared` axes."""
    positions = tensor.shape[1 : 1 + shared].num_elements()
    if positions:
        return tf.reshape(tensor, [-1, positions, features])
    # Pass all sizes: `tf.reshape` cannot infer the size of an empty batch.
    batch, *sizes = tf.unstack(tf.shape(tensor))[: 1 + shared]
    return tf.reshape(tensor, [batch, math.prod(sizes), features])


def fold_mask(mask: tf.Tensor | None, shape: tf.Tensor) -> tf.Tensor | None:
    """Broadcast a mask to all positions and reshape to `(batch, shared)`.

    Args:
        mask: Bool of shape `(batch, ...)`, or None.
        shape: Dynamic shape `(batch, ...)` of the positions.

    Returns:
        Bool `(batch, shared)`; None if the mask does not fit.
    """
    if mask is None or mask.shape.rank is None:
        return None
    missing_axes = shape.shape[0] - mask.shape.rank
    if missing_axes < 0:
        return None
    mask = tf.reshape(mask, tf.concat([tf.shape(mask), [1] * missing_axes], 0))
    mask = tf.broadcast_to(tf.cast(mask, tf.bool), shape)
    return tf.reshape(mask, [shape[0], tf.reduce_prod(shape[1:])])


class MatrixGradient(NamedTuple):
    """Gradients of the weights of equal layers, as dense matrices.

    Plain or preconditioned; the first axis of all tensors is over the layers.

    Attributes:
        matrix: The gradients, `(layers, [groups,] inputs, outputs)`.
    """

    matrix: tf.Tensor

    def scaled(self, factor: tf.Tensor) -> "MatrixGradient":
        """Return the gradients multiplied by a scalar."""
        return MatrixGradient(self.matrix * tf.cast(factor, self.matrix.dtype))

    def inner(self, other: "LayerGradient") -> tf.Tensor:
        """Return the Frobenius inner product of two gradients per layer."""
        return row_sums(self.matrix * other.matrix)

    def bound(self) -> tf.Tensor:
        """Return an upper bound of half the squared norm of each layer."""
        return row_squares(self.matrix)

    def where(self, flags: tf.Tensor, otherwise: Any) -> "MatrixGradient":
        """Return this gradient where a layer's flag is true, else the other."""
        return MatrixGradient(select(flags, self.matrix, otherwise.matrix))

    def by_layer(self) -> "list[LayerGradient]":
        """Return the gradient of each layer, without the axis of layers."""
        return [MatrixGradient(matrix) for matrix in unstacked(self.matrix)]


class RowGradient(NamedTuple):
    """Gradients `a^T g` as products of rows, not computed as matrices.

    For a batch with fewer rows than features, preconditioning the rows is
    cheaper: `A^-1 a^T g G^-1 = (a A^-1)^T (g G^-1)`.

    Attributes:
        a: Inputs `(layers, rows, inputs)`, with a column of ones for the bias.
        g: Pre-activation gradients `(layers, rows, outputs)`.
    """

    a: tf.Tensor
    g: tf.Tensor

    @property
    def matrix(self) -> tf.Tensor:
        """The gradients, `(layers, inputs, outputs)`."""
        return tf.matmul(self.a, self.g, transpose_a=True)

    def scaled(self, factor: tf.Tensor) -> "RowGradient":
        """Return the gradients multiplied by a scalar."""
        return RowGradient(self.a, self.g * tf.cast(factor, self.g.dtype))

    def inner(self, other: "LayerGradient") -> tf.Tensor:
        """Return the Frobenius inner product of two gradients per layer."""
        if isinstance(other, RowGradient):
            products_a = tf.matmul(self.a, other.a, transpose_b=True)
            products_g = tf.matmul(self.g, other.g, transpose_b=True)
            return row_sums(products_a * products_g)
        return row_sums(tf.matmul(self.a, other.matrix) * self.g)

    def bound(self) -> tf.Tensor:
        """Return an upper bound of half the squared norm of each layer."""
        return 2 * row_squares(self.a) * row_squares(self.g)

    def where(self, flags: tf.Tensor, otherwise: Any) -> "RowGradient":
        """Return this gradient where a layer's flag is true, else the other."""
        return RowGradient(
            select(flags, self.a, otherwise.a),
            select(flags, self.g, otherwise.g),
        )

    def by_layer(self) -> "list[LayerGradient]":
        """Return the gradient of each layer, without the axis of layers."""
        pairs = zip(unstacked(self.a), unstacked(self.g), strict=True)
        return [RowGradient(a, g) for a, g in pairs]


LayerGradient = MatrixGradient | RowGradient
"""Gradients of the weights of equal layers, plain or preconditioned."""
