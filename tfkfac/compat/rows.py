"""Matrices that are filled row by row, in a graph."""

import tensorflow as tf

from tfkfac.compat.graphs import in_xla


def new_rows(count: int, length: int, dtype: tf.DType) -> tf.Tensor:
    """A matrix of zeros for `set_row`."""
    if in_xla():
        return tf.zeros([count, length], dtype)
    # What `tf.zeros` makes may be a constant, which is kept for other runs.
    return tf.raw_ops.Empty(shape=[count, length], dtype=dtype, init=True)


def copied_rows(matrix: tf.Tensor) -> tf.Tensor:
    """A copy for `set_row` of what is kept elsewhere, as in a variable."""
    return matrix if in_xla() else tf.raw_ops.DeepCopy(x=matrix)


def set_row(matrix: tf.Tensor, index: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """Returns a matrix with another row; that given must not be used again.

    `tf.tensor_scatter_nd_update` copies the matrix on a CPU.

    This relies on `InplaceUpdate` writing into the tensor it is given, and on
    TensorFlow making no constant of what `Empty` and `DeepCopy` return. XLA
    decides by itself what it copies.

    Args:
        matrix: What `new_rows`, `copied_rows` or this function returned.
        index: Number of the row, int32.
        row: The row.
    """
    if in_xla():
        return tf.tensor_scatter_nd_update(matrix, [[index]], row[None])
    return tf.raw_ops.InplaceUpdate(x=matrix, i=[index], v=row[None])
