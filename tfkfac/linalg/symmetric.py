"""Guarded decompositions of symmetric positive semi-definite matrices."""

from collections.abc import Sequence

import tensorflow as tf


def symmetrize(matrix: tf.Tensor) -> tf.Tensor:
    """Returns `(M + M^T) / 2` for `matrix` of shape `(..., n, n)`."""
    return (matrix + tf.linalg.matrix_transpose(matrix)) / 2


def all_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns a scalar bool: no NaN and no infinity in any tensor."""
    return tf.reduce_all(finite_ones(tensors))


def finite_ones(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a bool for each tensor: no NaN and no infinity in it.

    A sum carries every NaN and infinity of its terms, and one reduction is
    several times cheaper than an element-wise test. Values so large that
    their sum overflows float32 count as not finite.
    """
    wide = [tf.cast(t, tf.float32) if t.dtype.size < 4 else t for t in tensors]
    # With axes of its own each sum would be two operations.
    ranks = {tensor.shape.rank for tensor in wide} - {None}
    axes = {n: tf.constant(list(range(n)), tf.int32) for n in ranks}
    sums = [tf.reduce_sum(t, axes.get(t.shape.rank)) for t in wide]
    widest = max((x.dtype for x in sums), key=lambda dtype: dtype.size)
    return tf.math.is_finite(tf.stack([tf.cast(x, widest) for x in sums]))


def eigh(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Eigen-decomposition with eigenvalues clamped at zero.

    TensorFlow's CPU kernel raises on a matrix that is not finite, which would
    end training; such a matrix yields NaN here, for the caller to reject.

    Args:
        matrix: Symmetric matrices of shape `(..., n, n)`.

    Returns:
        Eigenvalues `(..., n)`, ascending, and eigenvectors as columns.
    """
    finite = all_finite([matrix])
    identity = tf.eye(tf.shape(matrix)[-1], dtype=matrix.dtype)
    values, vectors = tf.linalg.eigh(
        tf.where(finite, symmetrize(matrix), identity)
    )
    nan = tf.constant(float("nan"), matrix.dtype)
    return tf.where(finite, tf.maximum(values, 0), nan), vectors


def mean_eigenvalue(matrix: tf.Tensor) -> tf.Tensor:
    """Trace over dimension, `(...,)`, of matrices `(..., n, n)`."""
    return tf.reduce_mean(tf.linalg.diag_part(matrix), -1)


def rounding(dtype: tf.DType) -> float:
    """Returns the machine epsilon of a floating point dtype."""
    return 2.0**-52 if dtype == tf.float64 else 2.0**-23
