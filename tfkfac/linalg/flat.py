"""Several tensors as one flat vector."""

import math
from collections.abc import Sequence

import tensorflow as tf


class FlatSpace:
    """The space of vectors that a list of tensors makes, row-major, in order.

    Args:
        shapes: Shapes of the tensors.
        dtypes: Their dtypes. The vectors have the widest, at least float32.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtypes = list(dtypes)
        self._sizes = [math.prod(shape) for shape in self._shapes]
        wide = any(dtype == tf.float64 for dtype in dtypes)
        self.dtype = tf.float64 if wide else tf.float32

    @property
    def size(self) -> int:
        """Number of elements of a vector."""
        return sum(self._sizes)

    def join(self, tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
        """Returns the vector of some tensors; None is zero."""
        parts = [
            tf.zeros([size], self.dtype)
            if tensor is None
            else tf.cast(tf.reshape(tensor, [size]), self.dtype)
            for tensor, size in zip(tensors, self._sizes, strict=True)
        ]
        return tf.concat(parts, 0)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of a vector, in their own dtypes."""
        parts = tf.split(vector, self._sizes)
        return [
            tf.cast(tf.reshape(part, shape), dtype)
            for part, shape, dtype in zip(
                parts, self._shapes, self._dtypes, strict=True
            )
        ]
