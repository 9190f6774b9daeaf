"""Inverses of damped positive semi-definite matrices, by Cholesky."""

import tensorflow as tf

from tfkfac.linalg.symmetric import rounding, symmetrize

# From so many rows on, products are faster than solving for the identity.
LARGE = 384
# How often a large matrix is halved: a sixteenth of it is left to solve.
_LEVELS = 2


def damped_inverse(
    matrix: tf.Tensor, damping: tf.Tensor, large: bool | None = None
) -> tf.Tensor:
    """Computes `(M + damping I)^-1` by Cholesky.

    The damping is kept above the rounding error of the factorisation, four
    times machine epsilon times the trace, so that a singular matrix still has
    an inverse.
    What cannot be factorised comes out as NaN, for the caller to reject.

    Args:
        matrix: Symmetric matrices of shape `(..., n, n)`.
        damping: Non-negative numbers of shape `(...,)`, or one for all.
        large: Whether n is at least `LARGE`. None if the static shape tells.

    Returns:
        Symmetric matrices of shape `(..., n, n)`.
    """
    diagonal = tf.linalg.diag_part(matrix)
    floor = 4 * rounding(matrix.dtype) * tf.reduce_sum(diagonal, -1)
    # A matrix of zeros without damping is inverted as the identity.
    shift = tf.maximum(damping, floor)
    shift = tf.where(shift > 0, shift, tf.ones_like(shift))
    damped = tf.linalg.set_diag(
        symmetrize(matrix), diagonal + tf.expand_dims(shift, -1)
    )
    root = tf.linalg.cholesky(damped)
    if large is None:
        large = matrix.shape[-1] >= LARGE
    if large:
        # To solve for the identity takes twice the operations that the result
        # needs, on one core. L is inverted by its quarters instead, and
        # L^-T L^-1 is made of them, most of it by products. Errors are those
        # of solving (Higham, 2002, section 14.2).
        return _gram(_inverse(root, _LEVELS), _LEVELS)
    return symmetrize(tf.linalg.cholesky_solve(root, _identity(root)))


def _inverse(lower: tf.Tensor, levels: int) -> tf.Tensor:
    """The inverse of a lower triangular matrix, halved so often."""
    if levels == 0:
        return tf.linalg.triangular_solve(lower, _identity(lower))
    first, below, last = _quarters(lower)
    first, last = _inverse(first, levels - 1), _inverse(last, levels - 1)
    below = -tf.matmul(last, tf.matmul(below, first))
    above = tf.zeros_like(tf.linalg.matrix_transpose(below))
    return _joined(first, above, below, last)


def _gram(lower: tf.Tensor, levels: int) -> tf.Tensor:
    """`J^T J` of a lower triangular matrix, halved so often."""
    if levels == 0:
        return symmetrize(tf.matmul(lower, lower, transpose_a=True))
    first, below, last = _quarters(lower)
    mixed = tf.matmul(below, last, transpose_a=True)
    return _joined(
        _gram(first, levels - 1) + _gram(below, 0),
        mixed,
        tf.linalg.matrix_transpose(mixed),
        _gram(last, levels - 1),
    )


def _quarters(lower: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The quarters of a lower triangular matrix that are not zero."""
    half = tf.unstack(tf.shape(lower))[-1] // 2
    top, bottom = tf.split(lower, [half, -1], -2)
    below, last = tf.split(bottom, [half, -1], -1)
    return tf.split(top, [half, -1], -1)[0], below, last


def _joined(
    first: tf.Tensor, above: tf.Tensor, below: tf.Tensor, last: tf.Tensor
) -> tf.Tensor:
    """The matrix of its quarters."""
    rows = tf.concat([first, above], -1), tf.concat([below, last], -1)
    return tf.concat(rows, -2)


def _identity(like: tf.Tensor) -> tf.Tensor:
    ones = tf.ones_like(tf.linalg.diag_part(like))
    return tf.linalg.set_diag(tf.zeros_like(like), ones)
