"""Schedule of the estimations, and learning rate of the Newton steps."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.fosi.subspace import State
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.training.job import Job

# Default warm-up: a fraction of the run, or updates if its length is unknown.
WARMUP_SHARE = 0.075
WARMUP_STEPS = 100
# Without an interval: updates until an unusable estimation is repeated.
RETRY = 100


@dataclasses.dataclass(frozen=True)
class Timing:
    """Schedule of the estimations, in updates of the weights."""

    warmup_steps: int | None  # None: a fraction of the run
    interval: Hyperparameter  # None: a single estimation

    def warmup(self, states: Sequence[State]) -> int:
        """Updates before the first estimation; a default if unknown."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        updates = int(states[0].warmup.numpy()) if states else -1
        return updates if updates >= 0 else WARMUP_STEPS

    def begins(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """True if an estimation begins before the step at this clock."""
        since, last = self._since(clock, state), state.last
        if self.interval.get() is None:
            begins = tf.equal(state.estimations, 0) & (clock - last >= RETRY)
        else:
            begins = tf.equal(since % self.interval.at(clock), 0)
        begins |= last < 0
        return (since >= 0) & begins & tf.not_equal(last, clock)

    def ends(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """True if an interval ends after the step at this clock."""
        since = self._since(clock, state)
        ends = tf.equal(since % self.interval.at(clock), 0)
        return ends & tf.not_equal(clock, state.last)

    def _since(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Updates since the warm-up."""
        if self.warmup_steps is not None:
            return clock - self.warmup_steps
        warmup = tf.convert_to_tensor(state.warmup)
        default = tf.constant(WARMUP_STEPS, warmup.dtype)
        return clock - tf.where(warmup < 0, default, warmup)


def default_warmup(job: Job, states: Sequence[State], steps: int | None) -> int:
    """Return the default warm-up, in updates, of a run of `steps` steps.

    Equal on all processes. -1 if `steps` is None or, on several, no states.
    """
    warmup = -1
    if steps is not None:
        inner = job.inner_optimizer
        updates = steps // (inner.gradient_accumulation_steps or 1)
        warmup = math.ceil(WARMUP_SHARE * updates)
    if job.topology.replicas == len(job.topology.local):
        return warmup
    if not states:
        return -1
    # Workers with different warm-ups would wait for each other forever.
    with tf.device("CPU:0"):
        local = tf.constant([warmup], tf.int64)
        gathered = job.among_processes("run length").all_gather(local)
    return int(gathered[0, 0])


@dataclasses.dataclass(frozen=True)
class NewtonRate:
    """The learning rate of Newton steps.

    A number alpha is scaled by the inner learning rate over its largest value
    so far. Its first value may be nearly 0 (a warm-up of the rate).
    """

    alpha: Hyperparameter  # a schedule is the rate itself

    def record_largest(self, job: Job, state: State) -> None:
        """Update the largest inner learning rate; call once per step."""
        if is_number(self.alpha.get()):
            largest = state.largest_rate
            largest.assign(tf.maximum(largest, _inner_rate(job)))

    def at(self, job: Job, state: State) -> tf.Tensor:
        """The rate of this step, a float64 scalar."""
        alpha = self.alpha.at(job.clock)
        if not is_number(self.alpha.get()):
            return alpha
        largest = tf.convert_to_tensor(state.largest_rate)
        factor = tf.math.divide_no_nan(_inner_rate(job), largest)
        return alpha * tf.where(largest > 0, factor, tf.ones_like(factor))


def _inner_rate(job: Job) -> tf.Tensor:
    """The inner optimizer's learning rate in this step, a float64 scalar."""
    rate = tf.convert_to_tensor(job.inner_optimizer.learning_rate)
    return tf.cast(rate, tf.float64)
