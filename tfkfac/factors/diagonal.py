"""A factor that is diagonal."""

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tfkfac.factors.base import VALUES, Factor, Side, Tensors
from tfkfac.factors.parts import Part
from tfkfac.linalg.tensors import rounding


@dataclasses.dataclass(frozen=True)
class Diagonal(Factor):
    """A diagonal matrix, kept as a vector. Its eigenbasis is the identity.

    Attributes:
        size: Number of its elements.
    """

    size: int

    @property
    @override
    def storage(self) -> Part:
        return Part((self.size,))

    @property
    @override
    def whole_size(self) -> int:
        return 0

    @property
    @override
    def operations(self) -> int:
        return self.size

    @property
    @override
    def multiplications(self) -> int:
        return self.size

    @property
    @override
    def text(self) -> str:
        return f"diagonal {self.size}"

    @override
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(rows), [0, 1])

    @override
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(value)

    @override
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        return tf.linalg.diag(value)

    @override
    def inverse_parts(self) -> dict[str, Part]:
        return {"": Part((self.size,))}

    @override
    def inverse(
        self, value: tf.Tensor, damping: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        floor = rounding(value.dtype) * tf.reduce_max(value)
        shift = tf.maximum(damping, floor)
        # A diagonal of zeros without damping is inverted as the identity.
        shift = tf.where(shift > 0, shift, tf.ones_like(shift))
        return {"": 1 / (value + shift)}

    @override
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        diagonal = inverse[""]
        return matrix * (diagonal[:, None] if side == "left" else diagonal)

    @override
    def eigen_parts(self) -> dict[str, Part]:
        return {VALUES: Part((self.size,))}

    @override
    def eigen(self, value: tf.Tensor) -> dict[str, tf.Tensor]:
        return {VALUES: tf.maximum(value, 0)}

    @override
    def rotate(
        self,
        eigen: Tensors,
        matrix: tf.Tensor,
        side: Side,
        back: bool = False,
    ) -> tf.Tensor:
        return matrix
