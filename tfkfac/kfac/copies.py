"""What workers tell each other beside the gradients: what went wrong where.

What has to be decomposed at once follows from what all of them know together.

Several gradient workers of a block keep copies of one decomposition, and each
preconditions by itself. A copy that has broken would give this worker other
weights than the others', so all compare theirs before they use them.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfkfac.compat.together import together
from tfkfac.distributed.plan import Plan
from tfkfac.kfac.counters import FAULTS
from tfkfac.kfac.state import State
from tfkfac.linalg.digest import BITS, to_bits
from tfkfac.training.guards import count_each
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
    copied, asked = copied_blocks(plan), state.counters.asked()
    news = [state.counters.news()] if step.group.size > 1 else []
    bits = [bits_of(state, copied)] if copied else []
    own = [asked, *news, *bits]
    first = next((g for g in step.gradients if g is not None), None)
    dtype = tf.float32 if first is None else first.dtype
    sums = step.reduce(*(tf.cast(one, dtype) for one in own))
    for told in news:
        state.counters.hear(told, anywhere=sums[1] > 0)
    if plan.shares_clocks:
        asked = sums[0] > 0
    if copied:
        asked |= find_broken(state, plan, sums[-1])
    return asked


def copied_blocks(plan: Plan) -> list[int]:
    """The blocks whose decomposition several workers keep."""
    layers = enumerate(plan.layers)
    return [i for i, one in layers if len(one.gradient_workers) > 1]


def bits_of(state: State, copied: Sequence[int]) -> tf.Tensor:
    """Digests of this worker's copies, zeros where it has none."""
    kept = {i: state.preconditioners[i].decomposition for i in copied}
    own = {i: one.digest() for i, one in kept.items() if one is not None}
    made = dict(zip(own, together(list(own.values())), strict=True))
    none = tf.constant(0, tf.int64)
    return to_bits(tf.stack([made.get(i, none) for i in copied]))


def find_broken(state: State, plan: Plan, bits: tf.Tensor) -> tf.Tensor:
    """Counts blocks whose copies are not the same on all workers.

    Args:
        state: What this worker keeps.
        plan: Who does what of the blocks.
        bits: The sums of `bits_of` over the workers.

    Returns:
        Whether each of all blocks is one.
    """
    counters, copied = state.counters, copied_blocks(plan)
    workers = [[len(plan.layers[i].gradient_workers)] for i in copied]
    all_ones = tf.equal(bits, tf.constant(workers, bits.dtype))
    same = tf.reduce_all(tf.equal(bits, 0) | all_ones, 1)
    flags = dict(zip(copied, tf.unstack(same), strict=True))
    broken = tf.logical_not(counters.by_position(flags, otherwise=True))
    count_each(
        broken,
        counters.broken,
        counters.paths,
        "the workers' copies of the decomposition differ, all are made anew.",
    )
    return broken


def asking_bytes(plan: Plan, weights: Sequence[keras.Variable]) -> int:
    """Bytes of what travels with the gradients for that.

    Args:
        plan: Who does what of the blocks.
        weights: The weights, whose dtype it has.
    """
    flags = len(plan.layers) * (1 + len(FAULTS))
    numbers = flags + BITS * len(copied_blocks(plan))
    return numbers * int(tf.as_dtype(weights[0].dtype).size)
