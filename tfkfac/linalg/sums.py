"""Sums over long vectors.

TensorFlow's CPU products of a few rows with a vector add up one element after
the other: in float32 `x . x` is 1e-4 off at 4e5 elements and 1.6e-2 at 1e7.
Here they are made in chunks, and the chunks are added up in float64.
(`tf.nn.l2_loss` and `tf.reduce_sum` add in a tree, with errors of 1e-7.)
"""

from collections.abc import Sequence

import tensorflow as tf

# oneDNN's products are 5e-6 off at 512 equal elements, others 4e-7 at 2,048.
CHUNK = 256
_WHOLE = 2048


def row_products(matrix: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Products of rows `(r, n)` with a vector of static length n."""
    size = vector.shape[0]
    whole = size - size % CHUNK
    if whole in (0, size):
        return _add_chunks(matrix, vector)
    rest = _add_chunks(matrix[:, whole:], vector[whole:])
    return _add_chunks(matrix[:, :whole], vector[:whole]) + rest


def _add_chunks(matrix: tf.Tensor, vector: tf.Tensor) -> tf.Tensor:
    """Products in chunks, or in a single one that is shorter."""
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


def stacked(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Scalars, at least one, of any float dtypes as a vector in float64."""
    widest = max((x.dtype for x in numbers), key=lambda dtype: dtype.size)
    vector = tf.stack([tf.cast(x, widest) for x in numbers])
    return tf.cast(vector, tf.float64)
