"""When factors and decompositions are due."""

import tensorflow as tf


def dense_start(
    iteration: tf.Tensor,
    boundaries: tuple[int, int],
    intervals: tuple[int, ...],
) -> tf.Tensor:
    """An interval that is short at first, when the curvature changes fast.

    Args:
        iteration: The iteration.
        boundaries: Where the second and the third interval begin.
        intervals: The three intervals.

    Returns:
        The interval, a scalar int64.
    """
    first, second = boundaries
    short, middle, long = (tf.constant(i, tf.int64) for i in intervals)
    late = tf.where(iteration < second, middle, long)
    return tf.where(iteration < first, short, late)


# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions.
_BOUNDARIES = (20, 100)


_FACTOR_INTERVALS = (1, 5, 10)


_INVERSE_INTERVALS = (5, 20, 50)
