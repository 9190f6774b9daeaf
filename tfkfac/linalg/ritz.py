"""The ends of a spectrum, from a Lanczos iteration."""

from typing import NamedTuple

import tensorflow as tf

from tfkfac.linalg.lanczos import Tridiagonal


class RitzPairs(NamedTuple):
    """The ends of the spectrum.

    Attributes:
        values: Ritz values `(r,)` in float64, ascending.
        weights: Ritz vectors `(r, steps)` in the basis, in float64.

    Value and weights of pairs that do not exist, because the iteration found
    fewer, are zero.
    """

    values: tf.Tensor
    weights: tf.Tensor


def ritz_pairs(
    tridiagonal: Tridiagonal, num_largest: int, num_smallest: int
) -> RitzPairs:
    """Decomposes the tridiagonal matrix.

    Args:
        tridiagonal: The matrix; its last row couples to nothing.
        num_largest: Number of pairs from the upper end.
        num_smallest: Number of pairs from the lower end.
    """
    diagonal = tf.cast(tridiagonal.diagonal, tf.float64)
    coupling = tf.cast(tridiagonal.coupling[:-1], tf.float64)
    kept = tridiagonal.kept
    numbers = tf.concat([diagonal, coupling], 0)
    finite = tf.reduce_all(tf.math.is_finite(numbers))
    # Rows that do not count get an eigenvalue above all others.
    bound = 1 + 4 * tf.reduce_max(tf.abs(numbers))
    full = tf.where(kept, diagonal, bound)
    matrix = tf.linalg.diag(full)
    if coupling.shape[0]:
        matrix += tf.linalg.diag(coupling, k=1) + tf.linalg.diag(coupling, k=-1)
    # TensorFlow's CPU kernel raises on a matrix that is not finite.
    values, vectors = tf.linalg.eigh(
        tf.where(finite, matrix, tf.zeros_like(matrix))
    )
    count = tf.reduce_sum(tf.cast(kept, tf.int32))
    low, high = tf.range(num_smallest), count - 1 - tf.range(num_largest)
    index = tf.concat([low, high], 0)
    valid = tf.concat([low < count - num_largest, high >= 0], 0)
    index = tf.where(valid, index, 0)
    nan = tf.constant(float("nan"), tf.float64)
    values = tf.where(valid, tf.gather(values, index), 0)
    order = tf.argsort(values)
    weights = tf.transpose(tf.gather(vectors, index, axis=1))
    weights = tf.where(valid[:, None], weights, 0)
    return RitzPairs(
        tf.where(finite, tf.gather(values, order), nan),
        tf.gather(weights, order),
    )
