"""What a curvature block is: a layer's factors and its gradient as a matrix.

One tensor convention serves all layer types. Layer inputs `a` and gradients
at the pre-activation `g` are rows of shape `(batch, shared, features)`, or
`(batch, shared, groups, features)` for layers made of independent groups.
`shared` counts the positions at which the same weights are used: output
pixels, tokens, 1 for a plain dense layer. The gradient of the weights is a
matrix `(inputs + 1, outputs)`, the bias last, or `(groups, inputs + 1,
outputs)`.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.record import Record


class Rows(NamedTuple):
    """Inputs and pre-activation gradients as rows.

    Attributes:
        a: Inputs `(batch, shared, [groups,] inputs)`, the bias' 1 included;
            for a diagonal factor the integer tokens `(batch, shared)`; None
            for a block without factor A.
        g: Gradients `(batch, shared, [groups,] outputs)`.
        mask: Bool `(batch, shared)`, False where padded, or None.
    """

    a: tf.Tensor | None
    g: tf.Tensor
    mask: tf.Tensor | None


class Statistic(NamedTuple):
    """A sum over rows and the number it has to be divided by."""

    total: tf.Tensor
    count: tf.Tensor


class Block(abc.ABC):
    """Kronecker-factored curvature block of the weights of one layer.

    Args:
        layer: A built Keras layer.
        path: Unique name that ends with the layer's name.
    """

    kind: str

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        self.layer = layer
        self.path = path
        wide = keras.backend.standardize_dtype(layer.variable_dtype)
        self.dtype = tf.float64 if wide == "float64" else tf.float32

    # ------------------------------------------------------ of a layer type
    @staticmethod
    def unsupported(layer: keras.layers.Layer) -> str | None:
        """Returns why this layer can have no such block, or None."""
        return None

    @property
    @abc.abstractmethod
    def variables(self) -> list[keras.Variable]:
        """The weights covered, kernel first."""

    @property
    @abc.abstractmethod
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of "A" and "G"; a diagonal factor is a vector."""

    @abc.abstractmethod
    def rows(self, record: Record) -> Rows:
        """Turns a record of the layer into rows."""

    @abc.abstractmethod
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gradients of `variables` as one `([groups,] inputs, outputs)`."""

    @abc.abstractmethod
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        """Inverse of `to_matrix`."""

    # -------------------------------------------------------------- shared
    def cast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Casts to the dtype of the statistics, float32 or better."""
        return tf.cast(tensor, self.dtype)

    def input_statistic(
        self, a: tf.Tensor, weights: tf.Tensor | None, sharing: str
    ) -> Statistic:
        """Sum of `a a^T` over the rows that carry loss, and their number."""
        a, count = weigh(a, weights, self.dtype)
        if sharing == "reduce":
            a, count = average_positions(a, weights, self.dtype)
        return Statistic(gram(a), count)

    def output_statistic(self, g: tf.Tensor, sharing: str) -> tf.Tensor:
        """Sum of `g g^T` over rows; "reduce" adds an example's rows first."""
        if sharing == "reduce":
            g = tf.reduce_sum(g, 1, keepdims=True)
        return gram(g)

    def dense(self, factors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The block as an explicit matrix, for tests on small layers.

        Args:
            factors: The factors by name.

        Returns:
            `A (x) G` acting on the row-major flattened gradient matrix, of
            shape `([groups,] inputs * outputs, inputs * outputs)`.
        """
        g = factors["G"]
        a = factors.get("A")
        if a is None:
            return g
        if a.shape.rank < g.shape.rank:
            a = tf.linalg.diag(a)
        product = tf.einsum("...ij,...kl->...ikjl", a, g)
        size = a.shape[-1] * g.shape[-1]
        return tf.reshape(product, [*g.shape[:-2], size, size])


def weigh(
    a: tf.Tensor, weights: tf.Tensor | None, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Zeroes the rows that carry no loss and counts the others."""
    if weights is None:
        shape = tf.shape(a)
        return a, tf.cast(shape[0] * shape[1], dtype)
    extra = [1] * (a.shape.rank - 2)
    shape = tf.concat([tf.shape(weights), extra], 0)
    # Not a product: a padded row may hold anything, NaN included.
    a = tf.where(tf.reshape(weights, shape) > 0, a, tf.zeros_like(a))
    return a, tf.reduce_sum(weights)


def average_positions(
    a: tf.Tensor, weights: tf.Tensor | None, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean over the positions of each example ("reduce"), and the examples."""
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


def gram(rows: tf.Tensor) -> tf.Tensor:
    """Sum of the outer products of rows with themselves.

    Args:
        rows: `(batch, shared, [groups,] n)`.

    Returns:
        `([groups,] n, n)`.
    """
    width = rows.shape[-1]
    if rows.shape.rank == 4:
        rows = tf.reshape(rows, [-1, rows.shape[2], width])
        rows = tf.transpose(rows, [1, 0, 2])
    else:
        rows = tf.reshape(rows, [-1, width])
    return tf.matmul(rows, rows, transpose_a=True)


def append_one(rows: tf.Tensor) -> tf.Tensor:
    """Appends the bias' 1 to each row."""
    return tf.concat([rows, tf.ones_like(rows[..., :1])], -1)


def stack_bias(
    kernel: tf.Tensor, bias: Sequence[tf.Tensor], dtype: tf.DType
) -> tf.Tensor:
    """Puts the bias gradient, if any, under a kernel gradient matrix."""
    kernel = tf.cast(kernel, dtype)
    if not bias:
        return kernel
    row = tf.reshape(bias[0], [*kernel.shape[:-2], 1, kernel.shape[-1]])
    return tf.concat([kernel, tf.cast(row, dtype)], -2)
