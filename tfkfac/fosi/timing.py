"""When directions are estimated."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.fosi.state import State
from tfkfac.shell.hyperparameters import Hyperparameter
from tfkfac.training.job import Job

# The warm-up's share of a run whose length `fit` tells, and its updates where
# nobody does.
WARMUP_SHARE = 0.075
WARMUP_STEPS = 100
# Without an interval, updates until an estimation of no use is made again.
RETRY = 100


@dataclasses.dataclass(frozen=True)
class Timing:
    """When directions are estimated, in updates of the weights.

    Attributes:
        warmup_steps: Updates before the first estimation; None is a share of
            the run.
        interval: Updates between estimations; None is a single one.
    """

    warmup_steps: int | None
    interval: Hyperparameter

    def warmup(self, told: int) -> int:
        """Updates before the first estimation.

        Args:
            told: What a replica was told, -1 for nothing.
        """
        if self.warmup_steps is not None:
            return self.warmup_steps
        return told if told >= 0 else WARMUP_STEPS

    def first(self, states: Sequence[State]) -> int:
        """The warm-up as far as it is known."""
        return self.warmup(int(states[0].warmup.numpy()) if states else -1)

    def begins(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Whether an interval begins here, or nothing was done yet.

        Args:
            clock: Number of updates of the weights so far.
            state: What this replica keeps.
        """
        since, last = self._since(clock, state), state.last
        if self.interval.get() is None:
            begins = tf.equal(state.estimations, 0) & (clock - last >= RETRY)
        else:
            begins = tf.equal(since % self.interval.at(clock), 0)
        begins |= last < 0
        return (since >= 0) & begins & tf.not_equal(last, clock)

    def ends(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Whether the interval ends after this step; see `begins`."""
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


class Warmup:
    """Tells the states how long a run is, once."""

    def __init__(self) -> None:
        self._told = -1

    def expect(
        self, job: Job, states: Sequence[State], steps: int | None
    ) -> None:
        """Derives the warm-up, unless it is known or over.

        Args:
            job: The job.
            states: What each replica of this process keeps, if it is there.
            steps: Training steps of the run, if they are known.
        """
        if states and not is_open(states[0]):
            return
        told = -1
        if steps is not None:
            inner = job.inner_optimizer
            updates = steps // (inner.gradient_accumulation_steps or 1)
            told = math.ceil(WARMUP_SHARE * updates)
        if job.topology.replicas > len(job.topology.local):
            # Workers that disagree would wait for each other for ever.
            told = from_first(job, told) if states else -1
        self._told = told
        self.begin(states)

    def begin(self, states: Sequence[State]) -> None:
        """Gives states what was told before they were there."""
        with tf.init_scope():
            for state in states:
                state.warmup.assign(self._told)


def is_open(state: State) -> bool:
    """Whether nothing was told yet, nor estimated."""
    return int(state.warmup.numpy()) < 0 and int(state.last.numpy()) < 0


def from_first(job: Job, value: int) -> int:
    """What the first of several processes has; all of them ask."""
    processes = job.among_processes("run length")
    with tf.device("CPU:0"):
        gathered = processes.all_gather(tf.constant([value], tf.int64))
    return int(gathered[0, 0])
