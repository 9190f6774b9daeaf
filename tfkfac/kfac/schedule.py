"""When factors and decompositions are due."""

from collections.abc import Sequence

import tensorflow as tf

from tfkfac.distributed.plan import assign
from tfkfac.shell.hyperparameters import Hyperparameter, Value

# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions.
_BOUNDARIES = (20, 100)
_FACTORS = (1, 5, 20)
_INVERSES = (5, 20, 100)
# Where it ends up.
LATE = (_FACTORS[-1], _INVERSES[-1])

# Turns of decompositions. Each is a branch of the graph, so there are few.
_MOST_TURNS = 4
# Operations that are worth a turn of their own: about 10 ms of one core.
_WORTH_A_TURN = 2 * 10**8
# The longest turn may be so many times as long as it has to be.
_SLACK = 1.5


def check_interval(value: Value) -> Value:
    """Returns `factor_update_interval` unless it is the former "adaptive".

    Raises:
        ValueError: If it is.
    """
    if isinstance(value, str) and value == "adaptive":
        raise ValueError(
            "Argument `factor_update_interval` must be an integer of at least "
            "1, a `LearningRateSchedule` or a callable of the iteration or "
            "None. The intervals of THOR, which followed the traces of the "
            "factors, are gone: on two of three problems they gained nothing, "
            "for 2 to 34 % more time. "
            f"Received: factor_update_interval={value!r}"
        )
    return value


def factors_due(interval: Hyperparameter, clock: tf.Tensor) -> tf.Tensor:
    """Whether an interval between updates of the factors ends here.

    Args:
        interval: The user's interval; None is the measured schedule.
        clock: Number of updates of the weights so far.
    """
    return tf.equal(clock % factor_steps(interval, clock), 0)


def factor_steps(interval: Hyperparameter, clock: tf.Tensor) -> tf.Tensor:
    """Steps between updates of the factors, a scalar int64.

    Args:
        interval: The user's interval; None is the measured schedule.
        clock: Number of updates of the weights so far.
    """
    if interval.get() is None:
        return dense_start(clock, _BOUNDARIES, _FACTORS)
    return interval.at(clock)


def inverse_steps(interval: Hyperparameter, clock: tf.Tensor) -> tf.Tensor:
    """Steps between decompositions of a block, see `factor_steps`."""
    if interval.get() is None:
        return dense_start(clock, _BOUNDARIES, _INVERSES)
    return interval.at(clock)


def decompositions_due(
    turns: int,
    interval: Hyperparameter,
    factor_interval: Hyperparameter,
    clock: tf.Tensor,
) -> list[tf.Tensor]:
    """Which turns of decompositions are due, see `turns_due`.

    Args:
        turns: Number of turns.
        interval: The user's interval between decompositions.
        factor_interval: That between updates of the factors.
        clock: Number of updates of the weights so far.
    """
    factor = factor_steps(factor_interval, clock)
    return turns_due(turns, inverse_steps(interval, clock), factor, clock)


def take_turns(operations: Sequence[int]) -> tuple[int, ...]:
    """Divides the blocks into turns, so that no step has all decompositions.

    There are as few turns as keep each about as short as the largest block
    allows, a single one for a small model. They are of the blocks alone: the
    steps of a job must not depend on its number of workers.

    Args:
        operations: About how many the decompositions of each block take.

    Returns:
        The turn of each block, numbered from 0.
    """
    limit = _SLACK * max([_WORTH_A_TURN, *operations])
    count, turns = 1, (0,) * len(operations)
    while count < _MOST_TURNS and _longest(operations, turns) > limit:
        count += 1
        turns = assign(operations, count, "compute")
    return turns


def _longest(operations: Sequence[int], turns: Sequence[int]) -> int:
    """Operations of the longest turn."""
    lengths = dict.fromkeys(turns, 0)
    for work, turn in zip(operations, turns, strict=True):
        lengths[turn] += work
    return max(lengths.values(), default=0)


def turns_due(
    turns: int,
    interval: tf.Tensor,
    factor_interval: tf.Tensor,
    clock: tf.Tensor,
) -> list[tf.Tensor]:
    """Which turns of decompositions are due.

    They are spread evenly over the interval, so that each comes once in it. A
    turn that would come with a factor update comes one step later, when the
    factors are fresh and the step is free; a single turn is never delayed.

    Args:
        turns: Number of turns.
        interval: Steps between decompositions of a block, int64.
        factor_interval: Steps between updates of the factors, int64.
        clock: Number of updates of the weights so far.

    Returns:
        A scalar bool for each turn.
    """

    def occupied(delay: tf.Tensor) -> tf.Tensor:
        coincide = tf.equal(delay % factor_interval, 0) & (factor_interval > 1)
        return tf.cast(coincide, tf.int64)

    delays = [turn * interval // turns for turn in range(turns)]
    if turns > 1:
        delays = [delay + occupied(delay) for delay in delays]
    return [tf.equal((clock - delay) % interval, 0) for delay in delays]


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
