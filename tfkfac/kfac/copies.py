"""What workers tell each other beside the gradients: what went wrong where.

What has to be decomposed at once follows from what all of them know together.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfkfac.distributed.plan import Plan
from tfkfac.kfac.counters import FAULTS
from tfkfac.kfac.state import State
from tfkfac.training.step import Step


def ask_together(state: State, step: Step, plan: Plan) -> tf.Tensor:
    """Reduces the gradients, and with them what has to be decomposed.

    A worker that keeps decompositions of others' factors cannot make them by
    itself: what one has asked for, all do. It costs no message, nor does that
    all learn of the faults of the step before.

    Args:
        state: What this worker keeps.
        step: The step.
        plan: Who does what of the blocks.

    Returns:
        Whether each of all blocks is to be decomposed at once.
    """
    asked = state.counters.asked()
    news = [state.counters.news()] if step.group.size > 1 else []
    own = [asked, *news]
    first = next((g for g in step.gradients if g is not None), None)
    dtype = tf.float32 if first is None else first.dtype
    sums = step.reduce(*(tf.cast(one, dtype) for one in own))
    for told in news:
        state.counters.hear(told, anywhere=sums[1] > 0)
    return sums[0] > 0 if plan.shares_clocks else asked


def asking_bytes(plan: Plan, weights: Sequence[keras.Variable]) -> int:
    """Bytes of what travels with the gradients for that.

    Args:
        plan: Who does what of the blocks.
        weights: The weights, whose dtype it has.
    """
    flags = len(plan.layers) * (1 + len(FAULTS))
    return flags * int(tf.as_dtype(weights[0].dtype).size)
