"""The gradient of a layer as a solver sees it: a matrix, or rows."""

import abc
import dataclasses
from typing import Self

import tensorflow as tf
from typing_extensions import override

from tfkfac.linalg.tensors import select


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
