"""State of FOSI on a replica, schedule of estimations, rate of Newton steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.distributed.collectives import Communicator
from tfkfac.fosi.layouts import Layout, Split, SubspaceStep
from tfkfac.linalg.tensors import all_finite
from tfkfac.saving.entries import Contents, Region, Spread
from tfkfac.saving.slots import Slots
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.training.job import Job

# Leave directions with a curvature below this fraction of the largest curvature
# to the inner optimizer: the inverse of a small curvature is mostly noise.
_WEAK = 1e-3
# Upper bound of the length `|V c / lambda|` of a Newton step at the rate 1,
# relative to the running RMS of this length. The default rate is 0.1, so the
# longest applied step has this RMS as its length.
_MAX_RATIO = 10.0
_DECAY = 0.99  # decay per step of the mean square of step lengths
# Default warm-up, as a fraction of the updates of the run, or in updates if
# `fit` does not know the length of the run.
WARMUP_SHARE = 0.075
WARMUP_STEPS = 100
# Updates after which a failed estimation is repeated if no interval is set.
RETRY = 100


class InnerTraits(NamedTuple):
    """Properties of the inner optimizer that decide which state is needed."""

    accumulates: bool = False
    has_momentum: bool = False  # True for plain SGD with momentum


class Subspace(Slots):
    """The directions of extreme curvature that one worker keeps."""

    def __init__(self, layout: Layout, inner: InnerTraits, rank: int) -> None:
        # `OWNED` instead of `REPLICATED`: accelerators have no directions.
        super().__init__("subspace", spread=Spread.OWNED)
        self.layout = layout
        geometry, dtype = layout.geometry, layout.geometry.dtype
        count, shape = layout.shape[:1], (geometry.directions, geometry.size)
        row, column = (indices.start for indices in layout.ranges(rank))
        local = Region(shape[:1], (row,))

        def coefficients(name: str) -> tf.Variable:
            return self.slot(name, count, dtype, region=local)

        # The local block of V^T.
        region = Region(shape, (row, column))
        self.directions = self.slot(
            "directions", layout.shape, dtype, region=region
        )
        # The curvatures of all directions, ascending.
        self.ritz_values = self.slot("ritz_values", shape[:1], dtype)
        # Running mean square of the Newton steps' lengths.
        self.square = self.slot("square", dtype=dtype, least=0)
        # Local coefficients of the Newton steps' momentum.
        self.momentum = coefficients("momentum")
        self.accumulated = self.inner_momentum = None
        if inner.accumulates:  # local coefficients of accumulated gradients
            self.accumulated = coefficients("accumulated")
        if inner.has_momentum:  # elements of `V^T b`, plain SGD's momentum b
            self.inner_momentum = coefficients("inner_momentum")

    @staticmethod
    def replace_bytes(layout: Layout, inner: InnerTraits) -> int:
        """Bytes that a worker receives in `replace`."""
        combined = (1 + inner.accumulates) * layout.combine_bytes
        return combined + (1 + sum(inner)) * layout.coefficients_bytes

    def replace(
        self,
        ritz_values: tf.Tensor,
        directions: tf.Tensor,
        group: Communicator,
        inner_momentum: tf.Tensor | None = None,
    ) -> None:
        """Replace the directions; project the momentum on the new ones."""
        strong = tf.cast(is_strong(ritz_values), directions.dtype)
        mask = self.layout.columns.local_slice(strong, group.rank)[:, None]
        masked = directions * mask
        for variable in (self.momentum, self.accumulated):
            if variable is None:
                continue
            vector = self.combine([tf.convert_to_tensor(variable)], group)
            variable.assign(self.layout.coefficients(masked, vector, group))
        self.square.assign(tf.zeros_like(self.square))
        self.directions.assign(masked)
        self.ritz_values.assign(ritz_values)
        if inner_momentum is not None:
            self.project_momentum(inner_momentum, group)

    def project_momentum(
        self, inner_momentum: tf.Tensor, group: Communicator
    ) -> None:
        """Assign `V^T b` for plain SGD's momentum b to `inner_momentum`."""
        assert self.inner_momentum is not None
        self.inner_momentum.assign(self.coefficients(inner_momentum, group))

    def coefficients(self, vector: tf.Tensor, group: Communicator) -> tf.Tensor:
        """Return the local elements of `V^T x`."""
        return self.layout.coefficients(self.directions, vector, group)

    def project_out(
        self,
        gradient: tf.Tensor,
        group: Communicator,
        subspace_step: SubspaceStep | None = None,
    ) -> Split:
        """Split the gradient by `Layout.project_out`."""
        always = self.ritz_values, self.square, self.momentum
        state = *always, self.accumulated, self.inner_momentum
        state_valid = all_finite(
            [tf.convert_to_tensor(x) for x in state if x is not None]
        )
        return self.layout.project_out(
            self.directions, gradient, group, subspace_step, state_valid
        )

    def combine(
        self, weights: Sequence[tf.Tensor], group: Communicator
    ) -> tf.Tensor:
        """Compute `V sum_i c_i` for local coefficient vectors c_i."""
        return self.layout.combine(self.directions, weights, group)

    def clip_outlier(self, c: tf.Tensor, group: Communicator) -> tf.Tensor:
        """Clip the Newton step `c / |lambda|` at 10 times its RMS length.

        Otherwise one bad batch could undo the training. SPAM clips gradient
        spikes likewise (Huang et al., 2025). The first step is not clipped.
        """
        step = c * self.inverse_curvature(group.rank)
        square = tf.reduce_sum(tf.square(step))
        if not self.layout.reduces_gradients:  # each worker has a slice of c
            (square,) = group.all_reduce([square])
        mean = tf.convert_to_tensor(self.square)
        limit = tf.where(mean > 0, _MAX_RATIO**2 * mean, square.dtype.max)
        clipped = tf.minimum(square, limit)
        average = _DECAY * mean + (1 - _DECAY) * clipped
        self.square.assign(tf.where(mean > 0, average, clipped))
        factor = tf.sqrt(tf.math.divide_no_nan(clipped, square))
        return c * tf.where(square > limit, factor, tf.ones_like(factor))

    def inverse_curvature(self, rank: int) -> tf.Tensor:
        """`1 / |lambda|` of the local directions; 0 if not `is_strong`."""
        values = tf.convert_to_tensor(self.ritz_values)
        strong = is_strong(values)
        # `1 / lambda` would increase the loss along negative curvature.
        safe = tf.where(strong, tf.abs(values), tf.ones_like(values))
        inverse = tf.where(strong, 1 / safe, tf.zeros_like(values))
        return self.layout.columns.local_slice(inverse, rank)


def is_strong(values: tf.Tensor) -> tf.Tensor:
    """Return True for directions with curvature large enough to invert."""
    sizes = tf.abs(values)
    return sizes > _WEAK * tf.reduce_max(sizes)


class State(Slots):
    """The curvature state of one replica."""

    def __init__(self, layout: Layout, subspace: Subspace | None) -> None:
        super().__init__("replica")
        self.layout = layout
        self.subspace = subspace  # None on an accelerator
        worker_options: dict[str, Any] = {
            "spread": Spread.OWNED,
            "saved": subspace is not None,
        }
        self.estimations = self.slot("estimations", **worker_options)
        # Clock at the start of the last estimation; -1 before the first.
        self.last = self.slot("last_estimation", value=-1, least=-1)
        # Number of estimations that were not finite.
        self.failures = self.slot("failures", **worker_options)
        # Number of times that invalid directions were dropped.
        self.forgotten = self.slot("forgotten", saved=False)
        # Number of updates before the first estimation; -1 if unknown.
        self.warmup = self.slot("warmup", value=-1, least=-1)
        # The largest learning rate of the inner optimizer so far.
        self.largest_rate = self.slot("largest_rate", (), "float64", least=0)

    @property
    def existing_subspace(self) -> Subspace:
        """The subspace of a worker (not an accelerator)."""
        assert self.subspace is not None
        return self.subspace

    def forget(self) -> None:
        """Drop the directions; the next step estimates new ones."""
        self.existing_subspace.reset()
        self.estimations.assign(0)
        self.last.assign(-1)

    def contents(self) -> Contents:
        """The state to save."""
        entries = [] if self.subspace is None else self.subspace.entries()
        return Contents(self.entries() + entries)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Schedule of the estimations, in updates of the weights."""

    warmup_steps: int | None  # None: the default warm-up
    interval: Hyperparameter  # None: a single estimation

    def warmup(self, states: Sequence[State]) -> int:
        """Updates before the first estimation; a default if unknown."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        updates = int(states[0].warmup.numpy()) if states else -1
        return updates if updates >= 0 else WARMUP_STEPS

    def begins(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Return True if an estimation begins before step number `clock`."""
        updates, last = self._since_warmup(clock, state), state.last
        if self.interval.get() is None:
            begins = tf.equal(state.estimations, 0) & (clock - last >= RETRY)
        else:
            begins = tf.equal(updates % self.interval.at(clock), 0)
        begins |= last < 0
        return (updates >= 0) & begins & tf.not_equal(last, clock)

    def ends(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Return True if an interval ends after step number `clock`."""
        updates = self._since_warmup(clock, state)
        ends = tf.equal(updates % self.interval.at(clock), 0)
        return ends & tf.not_equal(clock, state.last)

    def _since_warmup(self, clock: tf.Tensor, state: State) -> tf.Tensor:
        """Return the number of updates since the warm-up."""
        if self.warmup_steps is not None:
            return clock - self.warmup_steps
        warmup = tf.convert_to_tensor(state.warmup)
        default = tf.constant(WARMUP_STEPS, warmup.dtype)
        return clock - tf.where(warmup < 0, default, warmup)


@dataclasses.dataclass(frozen=True)
class NewtonRate:
    """The learning rate of Newton steps."""

    # A schedule is the rate. A number is multiplied by the inner learning rate
    # over its largest value so far.
    alpha: Hyperparameter

    def record_largest(self, job: Job, state: State) -> None:
        """Update the largest inner learning rate; call once per step."""
        if is_number(self.alpha.get()):
            largest = state.largest_rate
            largest.assign(tf.maximum(largest, _inner_rate(job)))

    def at(self, job: Job, state: State) -> tf.Tensor:
        """Return the rate of the Newton step, a float64 scalar."""
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
