"""The directions that are sought, when, and the rate of their Newton steps."""

import dataclasses
import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.curvature.hessian import flat_space
from tfkfac.fosi.layouts import Geometry
from tfkfac.fosi.subspace import State
from tfkfac.linalg.lanczos import default_steps
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
    """The times of estimations, in updates of the weights.

    Attributes:
        warmup_steps: Updates before the first estimation; None is a share of
            the run.
        interval: Updates between estimations; None is a single one.
    """

    warmup_steps: int | None
    interval: Hyperparameter

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


class Warmup:
    """Derives the warm-up from the length of the run, once."""

    def __init__(self) -> None:
        self._told = -1

    def expect(
        self, job: Job, states: Sequence[State], steps: int | None
    ) -> None:
        """Derives the warm-up, unless it is known or over."""
        for state in states[:1]:
            if max(int(state.warmup.numpy()), int(state.last.numpy())) >= 0:
                return
        told = -1
        if steps is not None:
            inner = job.inner_optimizer
            updates = steps // (inner.gradient_accumulation_steps or 1)
            told = math.ceil(WARMUP_SHARE * updates)
        if job.topology.replicas > len(job.topology.local):
            # Workers that disagree would wait for each other for ever.
            told = _of_first_process(job, told) if states else -1
        self._told = told
        self.begin(states)

    def begin(self, states: Sequence[State]) -> None:
        """Gives new states what was told before they were there."""
        with tf.init_scope():
            for state in states:
                state.warmup.assign(self._told)


def _of_first_process(job: Job, value: int) -> int:
    """A number of the first of several processes; all of them ask."""
    processes = job.among_processes("run length")
    with tf.device("CPU:0"):
        gathered = processes.all_gather(tf.constant([value], tf.int64))
    return int(gathered[0, 0])


@dataclasses.dataclass(frozen=True)
class Search:
    """The directions that are sought, and when.

    Attributes:
        num_largest: Number of directions of largest curvature.
        num_smallest: Number of directions of smallest curvature.
        lanczos_steps: Products of an estimation; None is the default.
        seed: Seed of the start vector.
        timing: When they are estimated.
    """

    num_largest: int
    num_smallest: int
    lanczos_steps: int | None
    seed: int
    timing: Timing

    def geometry(self, job: Job) -> Geometry:
        """Sizes; never more directions or steps than weights."""
        space = flat_space(job.model.trainable_variables)
        largest = min(self.num_largest, space.size)
        smallest = min(self.num_smallest, space.size - largest)
        steps = self.lanczos_steps
        if steps is None:
            steps = default_steps(space.size, largest + smallest)
        steps = min(steps, space.size)
        return Geometry(space.size, largest, smallest, steps, space.dtype)

    def warn_if_fewer(self, job: Job, geometry: Geometry) -> None:
        """Warns if the model has fewer directions than were asked for."""
        asked = self.num_largest + self.num_smallest
        if geometry.directions < asked:
            warnings.warn(
                f"Model '{job.model.name}' has {geometry.size} weights: "
                f"optimizer '{job.name}' uses {geometry.directions} "
                f"directions, not {asked}.",
                stacklevel=2,
            )


@dataclasses.dataclass(frozen=True)
class NewtonRate:
    """A number alpha that follows the inner optimizer's learning rate.

    It is multiplied by that of the step over the largest so far: of a rate
    that decays, the first. Over the first in any case it would leave all
    bounds where a rate is warmed up from nearly nothing.

    Attributes:
        alpha: The number, or a schedule or callable, which is the rate itself.
    """

    alpha: Hyperparameter

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
