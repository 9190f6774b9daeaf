"""Flatten tensors into one vector, and multiply long vectors accurately.

TensorFlow's CPU products of a few rows with a vector sum sequentially: in
float32 the relative error of `x . x` is 1e-4 for 4e5 elements and 1.6e-2 for
1e7. Here products are computed in chunks, which are summed in float64.
(`tf.nn.l2_loss` and `tf.reduce_sum` use a tree, with errors of 1e-7.)
"""

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

# Elements of a chunk. With 512 equal elements, the relative error of oneDNN's
# products is 5e-6; other products have 4e-7 for 2,048 elements.
CHUNK = 256
_PADDING = 2048  # unit of padded sizes, in elements


class FlatSpace:
    """Conversion between a list of tensors and a flat vector.

    The vector concatenates the row-major tensors in order. Its dtype is float64
    if any tensor is float64, else float32.
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
        """Number of elements of the vector."""
        return sum(self._sizes)

    def join(
        self, tensors: Sequence[tf.Tensor | None], length: int | None = None
    ) -> tf.Tensor:
        """Concatenate tensors (None: zeros), and pad with zeros to `length`."""
        flat_tensors = [
            tf.zeros([size], self.dtype)
            if tensor is None
            else tf.cast(tf.reshape(tensor, [size]), self.dtype)
            for tensor, size in zip(tensors, self._sizes, strict=True)
        ]
        if length is not None and length > self.size:
            flat_tensors.append(tf.zeros([length - self.size], self.dtype))
        return tf.concat(flat_tensors, 0)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Split a vector, which may be padded, into tensors; invert `join`."""
        # Use slices, which are views if aligned; `tf.split` always copies.
        ends = list(itertools.accumulate(self._sizes))
        return [
            tf.cast(tf.reshape(vector[end - size : end], shape), dtype)
            for end, size, shape, dtype in zip(
                ends, self._sizes, self._shapes, self._dtypes, strict=True
            )
        ]


def row_products(matrix: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Inner products of rows `(r, n)` with a vector of static length n."""
    size = vector.shape[0]
    end = size - size % CHUNK
    if end in (0, size):
        return _sum_chunks(matrix, vector)
    remainder = _sum_chunks(matrix[:, end:], vector[end:])
    return _sum_chunks(matrix[:, :end], vector[:end]) + remainder


def _sum_chunks(matrix: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Compute `matrix vector` by full chunks, or a single shorter chunk."""
    size = vector.shape[0]
    count = max(size // CHUNK, 1)
    length = size // count
    products = tf.matmul(
        tf.reshape(matrix, [tf.shape(matrix)[0], count, 1, length]),
        tf.reshape(vector, [count, 1, length]),
        transpose_b=True,  # 4 times faster than with the vector as a column
    )
    total = tf.reduce_sum(tf.cast(products, tf.float64), [1, 2, 3])
    return tf.cast(total, vector.dtype)


def padded_size(size: int) -> int:
    """Round the size of a long vector up to a multiple of `_PADDING`."""
    # Short vectors, which could grow by more than 1/8, keep their size.
    return size if size <= 8 * _PADDING else -(-size // _PADDING) * _PADDING
