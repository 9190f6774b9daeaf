"""Several tensors as one flat vector, and sums over long vectors.

TensorFlow's CPU products of a few rows with a vector add up one element after
the other: in float32 `x . x` is 1e-4 off at 4e5 elements and 1.6e-2 at 1e7.
Here they are made in chunks, and the chunks are added up in float64.
(`tf.nn.l2_loss` and `tf.reduce_sum` add in a tree, with errors of 1e-7.)
"""

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

# oneDNN's products are 5e-6 off at 512 equal elements, others 4e-7 at 2,048.
CHUNK = 256
_WHOLE = 2048


class FlatSpace:
    """The space of vectors that a list of tensors makes, row-major, in order.

    They have the widest dtype of the tensors', at least float32.
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
        Up to a larger one that is given it ends in zeros.
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
        """Returns the tensors of a vector, behind which may be zeros."""
        # Slices of whole cache lines are views; `tf.split` always copies.
        ends = list(itertools.accumulate(self._sizes))
        return [
            tf.cast(tf.reshape(vector[end - size : end], shape), dtype)
            for end, size, shape, dtype in zip(
                ends, self._sizes, self._shapes, self._dtypes, strict=True
            )
        ]


def row_products(matrix: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Products of rows `(r, n)` with a vector of static length n."""
    size = vector.shape[0]
    whole = size - size % CHUNK
    if whole in (0, size):
        return _add_chunks(matrix, vector)
    rest = _add_chunks(matrix[:, whole:], vector[whole:])
    return _add_chunks(matrix[:, :whole], vector[:whole]) + rest


def _add_chunks(matrix: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Add up products of chunks, or of a single one that is shorter."""
    size = vector.shape[0]
    count = max(size // CHUNK, 1)
    length = size // count
    parts = tf.matmul(
        tf.reshape(matrix, [tf.shape(matrix)[0], count, 1, length]),
        tf.reshape(vector, [count, 1, length]),
        transpose_b=True,  # as a column the vector makes it 4 times slower
    )
    total = tf.reduce_sum(tf.cast(parts, tf.float64), [1, 2, 3])
    return tf.cast(total, vector.dtype)


def padded_size(size: int) -> int:
    """Size to store long vectors in: whole chunks, which nobody has to copy.

    Short ones, where that might be more than an eighth, stay as they are.
    """
    return size if size <= 8 * _WHOLE else -(-size // _WHOLE) * _WHOLE
