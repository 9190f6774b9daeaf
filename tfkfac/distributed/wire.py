"""The form in which tensors travel between workers."""

import dataclasses
from typing import Protocol

import tensorflow as tf


class Packable(Protocol):
    """A tensor's layout, which knows what of it has to travel."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of what `pack` returns."""

    def pack(self, value: tf.Tensor) -> tf.Tensor:
        """Leaves out what a receiver can tell from the rest."""

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """The form in which tensors travel.

    Attributes:
        symmetric: Whether symmetric matrices travel as triangles.
        factor_dtype: Dtype of statistics; None is their own.
        inverse_dtype: Dtype of decompositions, kept or sent; None is their
            own.
    """

    symmetric: bool = False
    factor_dtype: tf.DType | None = None
    inverse_dtype: tf.DType | None = None

    def shape(self, part: Packable) -> tuple[int, ...]:
        """Shape of a tensor on the wire."""
        return part.packed_shape if self.symmetric else part.shape

    def pack(self, part: Packable, value: tf.Tensor) -> tf.Tensor:
        """A tensor as it travels."""
        return part.pack(value) if self.symmetric else value

    def unpack(self, part: Packable, value: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return part.unpack(value) if self.symmetric else value
