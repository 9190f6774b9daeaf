"""Several tensors as one flat vector."""

import itertools
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

    def join(
        self, tensors: Sequence[tf.Tensor | None], length: int | None = None
    ) -> tf.Tensor:
        """Returns the vector of some tensors; None is zero.

        Its length is static, whatever is known of the shapes of the tensors.

        Args:
            tensors: The tensors.
            length: Length of the vector, where it is to end in zeros.
        """
        parts = [
            tf.zeros([size], self.dtype)
            if tensor is None
            else tf.cast(tf.reshape(tensor, [size]), self.dtype)
            for tensor, size in zip(tensors, self._sizes, strict=True)
        ]
        if length is not None and length > self.size:
            parts.append(tf.zeros([length - self.size], self.dtype))
        return tf.concat(parts, 0)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of a vector, in their own dtypes.

        Args:
            vector: Of the size of the space; zeros may follow.
        """
        # Slices of whole cache lines are views; `tf.split` always copies.
        ends = list(itertools.accumulate(self._sizes))
        return [
            tf.cast(tf.reshape(vector[end - size : end], shape), dtype)
            for end, size, shape, dtype in zip(
                ends, self._sizes, self._shapes, self._dtypes, strict=True
            )
        ]
