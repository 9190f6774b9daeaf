"""The times of estimations, and the rate of Newton steps."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.fosi.subspace import State
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.training.job import Job

# The warm-up's share of a run whose length `fit` tells, and its updates where
# nobody does.
WARMUP_SHARE = 0.075
WARMUP_STEPS = 100
# Without an interval, updates until an estimation of no use is made again.
RETRY = 100


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of estimations, in updates of the weights."""

    warmup_steps: int | None  # None is a share of the run
    interval: Hyperparameter  # None is a single estimation

    def first(self, states: Sequence[State]) -> int:
        """The warm-up as far as it is known."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        told = int(states[0].warmup.numpy()) if states else -1
        return told if told >= 0 else WARMUP_STEPS

    def begins(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """True if an interval begins here, or nothing was done yet."""
        since, last = self._since(clock, state), state.last
        if self.interval.get() is None:
            begins = tf.equal(state.estimations, 0) & (clock - last >= RETRY)
        else:
            begins = tf.equal(since % self.interval.at(clock), 0)
        begins |= last < 0
        return (since >= 0) & begins & tf.not_equal(last, clock)

    def ends(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """True if the interval ends after this step; see `begins`."""
        since = self._since(clock, state)
        ends = tf.equal(since % self.interval.at(clock), 0)
        return ends & tf.not_equal(clock, state.last)

    def _since(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Updates since the warm-up."""
        if self.warmup_steps is not None:
            return clock - self.warmup_steps
        told = tf.convert_to_tensor(state.warmup)
        unknown = tf.constant(WARMUP_STEPS, told.dtype)
        return clock - tf.where(told < 0, unknown, told)


def warmup_of(job: Job, states: Sequence[State], steps: int | None) -> int:
    """The warm-up of a run of some steps, of which all workers are told.

    It is -1 if nobody knows the steps, or a worker has no state to keep it in.
    """
    told = -1
    if steps is not None:
        inner = job.inner_optimizer
        updates = steps // (inner.gradient_accumulation_steps or 1)
        told = math.ceil(WARMUP_SHARE * updates)
    if job.topology.replicas == len(job.topology.local):
        return told
    if not states:
        return -1
    # Workers that disagree would wait for each other for ever.
    with tf.device("CPU:0"):
        own = tf.constant([told], tf.int64)
        gathered = job.among_processes("run length").all_gather(own)
    return int(gathered[0, 0])


@dataclasses.dataclass(frozen=True)
class NewtonRate:
    """A number alpha that follows the inner optimizer's learning rate.

    It is multiplied by that of the step over the largest so far: of a rate
    that decays, the first. Over the first in any case it would leave all
    bounds where a rate is warmed up from nearly nothing.
    """

    alpha: Hyperparameter  # a schedule or callable is the rate itself

    def note(self, job: Job, state: State) -> None:
        """Remembers the largest learning rate, once in every step."""
        if is_number(self.alpha.get()):
            largest = state.largest_rate
            largest.assign(tf.maximum(largest, _inner_rate(job)))

    def at(self, job: Job, state: State) -> tf.Tensor:
        """The rate of this step, a scalar in float64."""
        alpha = self.alpha.at(job.clock)
        if not is_number(self.alpha.get()):
            return alpha
        largest = tf.convert_to_tensor(state.largest_rate)
        share = tf.math.divide_no_nan(_inner_rate(job), largest)
        return alpha * tf.where(largest > 0, share, tf.ones_like(share))


def _inner_rate(job: Job) -> tf.Tensor:
    """The inner optimizer's learning rate in this step, in float64."""
    rate = tf.convert_to_tensor(job.inner_optimizer.learning_rate)
    return tf.cast(rate, tf.float64)
