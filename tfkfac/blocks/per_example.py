"""Blocks of weights whose gradient is known for each example."""

import abc
import math
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import Block
from tfkfac.blocks.rows import Rows
from tfkfac.capture.record import Record
from tfkfac.factors import Diagonal, Factor


class PerExampleBlock(Block, abc.ABC):
    """Fisher matrix of a few weights, or its diagonal.

    It is the mean over examples of `u u^T`, where `u` is the gradient of an
    example's loss in all weights of the block: no Kronecker product, so there
    is no A and nothing is approximated. Both ways of weight sharing are the
    same.

    A subclass says which its `variables` are, and computes
    `example_gradients`.

    Attributes:
        diagonal: Whether to keep the diagonal only. Defaults to False.
    """

    diagonal: bool = False

    @abc.abstractmethod
    def example_gradients(self, record: Record) -> list[tf.Tensor]:
        """The gradient of each example, summed over its positions.

        Args:
            record: What one call of the layer left behind.

        Returns:
            For each of `variables` a tensor of shape `(batch, *shape)`.
        """

    @property
    @override
    def factors(self) -> dict[str, Factor]:
        size = sum(self._sizes)
        if self.diagonal:
            return {"G": Diagonal(size)}
        return {"G": self.limit.matrix(size)}

    @override
    def rows(self, record: Record) -> Rows:
        gradients = self.example_gradients(record)
        batch = tf.shape(gradients[0])[0]
        flat = [
            tf.reshape(self.cast(gradient), [batch, size])
            for gradient, size in zip(gradients, self._sizes, strict=True)
        ]
        return Rows(None, tf.concat(flat, -1)[:, None], None)

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = [tf.reshape(self.cast(g), [-1]) for g in gradients]
        return tf.concat(flat, 0)[None]

    @override
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(matrix[0], self._sizes)
        return [
            tf.reshape(part, variable.shape)
            for part, variable in zip(parts, self.variables, strict=True)
        ]

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(variable.shape) for variable in self.variables]
