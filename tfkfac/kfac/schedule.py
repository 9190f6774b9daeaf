"""When factors and decompositions are due."""

import tensorflow as tf

from tfkfac.wrapper.hyperparameters import Hyperparameter

# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions.
_BOUNDARIES = (20, 100)
FACTOR_INTERVALS = (1, 5, 10)
INVERSE_INTERVALS = (5, 20, 50)


def is_due(
    interval: Hyperparameter,
    measured: tuple[int, int, int],
    clock: tf.Tensor,
) -> tf.Tensor:
    """Whether an interval ends here.

    Args:
        interval: The user's interval.
        measured: The intervals in its place where it is None.
        clock: Number of updates of the weights so far.

    Returns:
        A scalar bool.
    """
    steps = (
        dense_start(clock, _BOUNDARIES, measured)
        if interval.get() is None
        else interval.at(clock)
    )
    return tf.equal(clock % steps, 0)


def dense_start(
    clock: tf.Tensor,
    boundaries: tuple[int, int],
    intervals: tuple[int, int, int],
) -> tf.Tensor:
    """An interval that is short at first, when the curvature changes fast.

    Args:
        clock: Number of updates of the weights so far.
        boundaries: Where the second and the third interval begin.
        intervals: The three intervals.

    Returns:
        The interval, a scalar int64.
    """
    first, second = boundaries
    short, middle, long = (tf.constant(i, tf.int64) for i in intervals)
    late = tf.where(clock < second, middle, long)
    return tf.where(clock < first, short, late)
