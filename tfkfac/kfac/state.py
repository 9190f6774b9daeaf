"""State of one worker: factors, decompositions and counters of its blocks."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.factors import Tensors
from tfkfac.fisher.types import Statistics
from tfkfac.kfac.averages import (
    Decomposition,
    FactorAverages,
    Momentum,
    Pending,
    PlainMatrix,
    check_statistics,
    name_in_memory_errors,
    plain_matrices,
)
from tfkfac.kfac.length import SpectralLength
from tfkfac.kfac.placement import Placement
from tfkfac.saving.entries import Contents, Entry, Spread
from tfkfac.saving.slots import Slots
from tfkfac.shell.small_rates import RATE
from tfkfac.solvers import Solver
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job

# Names of the fault counters, each with its text in the list of events.
FAULTS = {
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}


class Preconditioner(Tracked):
    """Averages, decomposition and momentum of one block on one worker.

    An attribute is None if this worker does not store it.
    """

    def __init__(
        self,
        block: Block,
        solver: Solver,
        names: Sequence[str],
        preconditions: bool,
        inverse_dtype: tf.DType | None = None,
        has_momentum: bool = False,
    ) -> None:
        super().__init__(name="preconditioner")
        self.block = block
        self.factors: FactorAverages | None = None
        self.decomposition: Decomposition | None = None
        self.momentum: Momentum | None = None
        with name_in_memory_errors(block.path):
            if names:
                self.factors = FactorAverages(block, names)
            if preconditions:
                self.decomposition = Decomposition(solver, block, inverse_dtype)
                if has_momentum:
                    self.momentum = Momentum(block, solver.section)

    def entries(self) -> list[Entry]:
        """Return the checkpoint entries, under the block's current path."""
        return [
            dataclasses.replace(entry, layer=self.block.path)
            for slots in (self.factors, self.decomposition, self.momentum)
            if slots is not None
            for entry in slots.entries()
        ]


class State(Tracked):
    """The curvature state of one worker."""

    def __init__(self) -> None:
        super().__init__(name="replica")
        self.preconditioners: tuple[Preconditioner, ...] = ()
        self.counters = Counters(())
        self.pending: Pending | None = None
        self.report = StepReport()
        self.length: SpectralLength | None = None
        self.plain: tuple[PlainMatrix, ...] = ()
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    def fill(
        self, placement: Placement, rank: int, has_momenta: bool = False
    ) -> None:
        """Create the state of each block, or reuse state with an equal key."""
        if has_momenta:
            self.length = self.length or SpectralLength()
            self.length.is_recurrent = any(
                item.is_recurrent and plain_matrices([item])
                for item in placement.registry.leftovers
            )
            self._fill_plain(placement)
        previous = self.preconditioners
        by_key = {same_shape_key(p.block): p for p in previous}
        self.preconditioners = tuple(
            by_key.get(same_shape_key(block))
            or Preconditioner(
                block,
                placement.solver,
                placement.plan.owns(rank, i),
                placement.plan.preconditions(rank, i),
                placement.distribution.storage_dtype,
                has_momenta,
            )
            for i, block in enumerate(placement.blocks)
        )
        position_by_id = {id(p): i for i, p in enumerate(previous)}
        old_positions = {}
        for i, block in enumerate(placement.blocks):
            preconditioner = self.preconditioners[i]
            # Refer to the block of the current registry, for the summary.
            preconditioner.block = block
            if id(preconditioner) in position_by_id:
                old_positions[i] = position_by_id[id(preconditioner)]
        paths = tuple(block.path for block in placement.blocks)
        if self.counters.paths != paths:
            counters = Counters(paths)
            counters.copy_from(self.counters, old_positions)
            self.counters = counters

    def _fill_plain(self, placement: Placement) -> None:
        """Create the momenta of uncovered matrices; keep existing momenta."""
        existing = {id(matrix.variable): matrix for matrix in self.plain}
        self.plain = tuple(
            existing.get(id(variable)) or PlainMatrix(path, variable)
            for path, variable in plain_matrices(placement.registry.leftovers)
        )

    def accumulate(
        self, steps: int, placement: Placement, rank: int, job: Job
    ) -> None:
        """Create the sums over micro-batches; keep sums that fit the blocks."""
        observed = {
            i: block
            for i, block in enumerate(placement.blocks)
            if placement.plan.observes(rank, i)
        }
        if self.pending is None or not self.pending.is_for(observed):
            self.pending = Pending(steps, job, observed)

    def update_averages(
        self, statistics: Statistics, decay: float, due: tf.Tensor
    ) -> tf.Tensor:
        """Update the averages that are due; return 1 if any was, else 0.

        If the update is not due, only blocks without statistics are updated.
        """
        counters = self.counters
        due_flags = tf.logical_or(due, counters.without_statistics())
        due_list = tf.unstack(due_flags)
        updated: dict[int, tf.Tensor] = {}
        finite: dict[int, tf.Tensor] = {}
        valid: dict[int, tf.Tensor] = {}
        for i, by_name in sorted(statistics.items()):
            preconditioner = self.preconditioners[i]
            if preconditioner.factors is not None:
                updated[i], finite[i], valid[i] = preconditioner.factors.update(
                    by_name, decay, due_list[i]
                )
            else:  # Other workers store these averages.
                specs = preconditioner.block.factors
                complete, is_finite = check_statistics(specs, by_name)
                updated[i] = due_list[i] & complete & is_finite
        count_each(
            due_flags & ~counters.flags(finite),
            counters.rejected,
            counters.paths,
            "statistics are not finite, the factors keep their values.",
        )
        dropped = ~counters.flags(valid)
        count_each(
            dropped,
            counters.dropped,
            counters.paths,
            "the factors are not finite, their averages restart.",
        )
        counters.request_decomposition(dropped)
        updates = tf.cast(counters.flags(updated, otherwise=False), tf.int64)
        counters.observed.assign_add(updates)
        return tf.minimum(tf.reduce_sum(updates), 1)

    def decompose(
        self,
        places: Sequence[int],
        solver: Solver,
        dampings: Mapping[int, tf.Tensor],
    ) -> dict[int, Tensors]:
        """Decompose this worker's factors of the blocks at indices `places`."""
        parts: dict[int, Tensors] = {}
        for i, preconditioner in enumerate(self.preconditioners):
            if i in places and preconditioner.factors is not None:
                block = preconditioner.block
                with name_in_memory_errors(block.path):
                    parts[i] = preconditioner.factors.decompose(
                        solver, dampings[i]
                    )
                specs = solver.all_parts(block.factors)
                for name, tensor in parts[i].items():
                    tensor.set_shape(specs[name].shape)
        return parts

    def defer(self, due: tf.Tensor, dampings: Mapping[int, tf.Tensor]) -> None:
        """Let the decompositions that are due be computed after the step."""
        counters, positions = self.counters, range(len(self.preconditioners))
        counters.deferred.assign_add(tf.cast(due, tf.int64))
        values = tf.stack([dampings.get(i, 0.0) for i in positions])
        counters.dampings.assign(tf.where(due, values, counters.dampings))

    def replace_decompositions(
        self,
        parts: Mapping[int, Tensors],
        dampings: Mapping[int, tf.Tensor],
        due: tf.Tensor,
    ) -> None:
        """Replace the decompositions that are due and finite."""
        counters = self.counters
        due_list = tf.unstack(due)
        finite = {}
        for i, tensors in sorted(parts.items()):
            preconditioner = self.preconditioners[i]
            decomposition = preconditioner.decomposition
            if decomposition is not None:
                finite[i] = decomposition.replace(
                    tensors, dampings[i], due_list[i], preconditioner.momentum
                )
        count_each(
            due & ~counters.flags(finite),
            counters.failures,
            counters.paths,
            "the decomposition failed, the last valid one stays in use; a "
            "larger damping may help.",
        )
        counters.decomposed.assign_add(tf.cast(due, tf.int64))

    def contents(self, placement: Placement, rank: int) -> Contents:
        """Return the checkpoint entries, and the sections of a saved file."""
        plan, counters = placement.plan, self.counters
        # In "dp_kfac", owners have separate batches and update counts.
        spread = Spread.REPLICATED if plan.shares_clocks else Spread.EACH
        entries = [
            Entry("", "factor_updates", self.factor_updates, spread),
            Entry("", "inverse_updates", self.inverse_updates, spread),
        ]
        if self.length is not None:
            entries += self.length.entries()
        for i, preconditioner in enumerate(self.preconditioners):
            if plan.observes(rank, i):
                shared = plan.shares_clocks
                spread = Spread.REPLICATED if shared else Spread.OWNED
                entries.append(counters.entry("observed", i, spread))
                entries.append(counters.entry("decomposed", i, spread))
            if preconditioner.factors is not None:
                entries.append(counters.entry("rejected", i, Spread.OWNED))
            if preconditioner.decomposition is not None:
                entries.append(counters.entry("failures", i, Spread.OWNED))
            entries += preconditioner.entries()
        if self.pending is not None:
            entries += self.pending.entries()
        for matrix in self.plain:
            entries += matrix.entries()
        resets: dict[str, list[Callable[[], None]]] = defaultdict(list)
        resets[placement.solver.section].append(counters.reset_decomposed)
        momenta = [p.momentum for p in self.preconditioners]
        optional = [self.pending, *momenta, self.length, *self.plain]
        for slots in optional:
            if slots is not None:
                resets[slots.section].append(slots.reset)
        return Contents(
            entries,
            tuple(block.path for block in placement.blocks),
            {
                section: functools.partial(_call_all, calls)
                for section, calls in resets.items()
            },
        )

    def events(self) -> list[tuple[str, tf.Variable]]:
        """Return the texts and counts of abnormal events."""
        events = [("hints on the first steps", self.report.hints)]
        for i, path in enumerate(self.counters.paths):
            unexplained = Number(self.counters.unexplained, i)
            events.append((f"gradients of other passes in {path}", unexplained))
        return events + self.counters.events()


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def local_factors(states: Sequence[State]) -> dict[str, dict[str, np.ndarray]]:
    """Return the factors on local replicas, by layer path and factor name."""
    result = {}
    replicas = [state.preconditioners for state in states]
    for copies in zip(*replicas, strict=True):
        factors = {
            name: copy.block.factors[name].shown(value).numpy()
            for copy in copies
            if copy.factors is not None
            for name, value in copy.factors.values().items()
        }
        if factors:
            result[copies[0].block.path] = dict(sorted(factors.items()))
    return result


def same_shape_key(block: Block) -> Hashable:
    """Return the key by which `State.fill` finds reusable state of a block."""
    factors = tuple(sorted(block.factors.items()))
    return (id(block.layer), block.kind, factors)


class Counters(Slots):
    """Event counters on one replica; each is a vector with a number per block.

    One variable per counter lets a step update all blocks at once.

    Attributes:
        observed: Factor updates.
        decomposed: Inverse updates, including failed ones; 0 requests one.
        unexplained: Gradients that match no recorded backward pass.
        rejected: Statistics that were not finite.
        dropped: Averages that were not finite.
        failures: Decompositions that were not finite.
        plain: Gradients whose preconditioned gradient was invalid.
        deferred: 1 for an inverse that is computed after the current step.
        dampings: Damping of the block in that step.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__("counters")
        self.paths = tuple(paths)
        self.observed = self._counter("observed")
        self.decomposed = self._counter("decomposed")
        self.unexplained = self._counter("unexplained_gradients")
        self.rejected = self._counter("rejected_statistics")
        self.dropped = self._counter("dropped_factors")
        self.failures = self._counter("failed_decompositions")
        self.plain = self._counter("plain_gradients")
        self.deferred = self._counter("deferred_decompositions")
        self.dampings = self.slot(
            "deferred_dampings", [len(self.paths)], "float64", saved=False
        )

    def _counter(self, name: str) -> tf.Variable:
        return self.slot(name, [len(self.paths)], saved=False)

    def copy_from(
        self, other: "Counters", positions: Mapping[int, int]
    ) -> None:
        """Copy counters of `other`; `positions` maps new to old positions."""
        for variable, source in zip(
            self.variables, other.variables, strict=True
        ):
            numbers = variable.numpy()
            for new, old in positions.items():
                numbers[new] = source.numpy()[old]
            variable.assign(numbers)

    def events(self) -> list[tuple[str, "Number"]]:
        """Return the text and count of each fault of each block."""
        return [
            (f"{description} {path}", Number(getattr(self, name), i))
            for name, description in FAULTS.items()
            for i, path in enumerate(self.paths)
        ]

    def entry(self, name: str, place: int, spread: Spread) -> Entry:
        """Return the checkpoint entry of one counter of a block."""
        number = Number(getattr(self, name), place)
        return Entry(self.paths[place], name, number, spread)

    def reset_decomposed(self) -> None:
        """Request the decomposition of all blocks in the next step."""
        self.decomposed.assign(tf.zeros_like(self.decomposed))

    def request_decomposition(self, flags: tf.Tensor) -> None:
        """Request the decomposition of the flagged blocks in the next step."""
        old = self.decomposed
        old.assign(tf.where(flags, tf.zeros_like(old), old))

    def without_statistics(self) -> tf.Tensor:
        """Return a bool per block, True if it has no statistics yet."""
        return tf.equal(self.observed, 0)

    def flags(
        self,
        by_position: Mapping[int, tf.Tensor | None],
        otherwise: bool = True,
    ) -> tf.Tensor:
        """Return a bool per block: its flag, or `otherwise` if it has none."""
        if not self.paths:
            return tf.zeros([0], tf.bool)
        default = tf.constant(otherwise)
        flags = [by_position.get(i) for i in range(len(self.paths))]
        return tf.stack([default if flag is None else flag for flag in flags])


class Number:
    """Scalar checkpoint view of one element of a vector variable."""

    def __init__(self, numbers: tf.Variable, place: int) -> None:
        self._numbers = numbers
        self._index = place
        self.shape, self.dtype = tf.TensorShape([]), numbers.dtype

    def numpy(self) -> int:
        """Return the value of the element as a NumPy scalar."""
        return self._numbers.numpy()[self._index]

    def assign(self, value: tf.Tensor) -> None:
        """Assign a value to the element."""
        self._numbers.assign(
            tf.tensor_scatter_nd_update(self._numbers, [[self._index]], [value])
        )


class Clip(NamedTuple):
    """Clip factor of one step, and the squared length before the clip."""

    factor: tf.Tensor
    """Factor that multiplies the preconditioned gradients."""
    length: tf.Tensor
    """Squared Fisher length of the step before the clip."""


# Names of the step metrics; a metric is NaN where it does not apply.
_NAMES = ("clip_factor", "length", "damping")
# Print the clip hint in step `HINT_STEP` if in at least `MIN_CLIPPED` steps the
# clip factor was below `LOW_FACTOR` and the squared length over `_MIN_LENGTH`.
HINT_STEP, MIN_CLIPPED, LOW_FACTOR, _MIN_LENGTH = 20, 12, 0.1, 2.0
# Count a step for the hint on the scale of the inputs if its clip factor times
# `max(1, learning rate / RATE)` is below this bound. On raw pixels, dense
# layers of 64 units have factors of 0.1 to 0.15 from step 6 on.
LOW_SCALED_FACTOR = 0.25


class StepReport(Slots):
    """Metrics of the last step, in variables of one replica.

    Attributes:
        clipped: Number of the first steps with a clip factor below `LOW_FACTOR`
            and a squared length over `_MIN_LENGTH`.
        short: Number of the first steps with a scaled clip factor below
            `LOW_SCALED_FACTOR`.
    """

    def __init__(self) -> None:
        super().__init__("report")
        self.steps = self.slot("reported_steps", saved=False)
        self.clipped = self.slot("clipped_steps", saved=False)
        self.short = self.slot("short_steps", saved=False)
        self.hints = self.slot("clip_hints", saved=False)
        self._values = {
            name: self.slot(name, (), "float64", saved=False) for name in _NAMES
        }

    def record(
        self, clip: Clip, damping: tf.Tensor, rate: tf.Tensor | None
    ) -> tf.Tensor:
        """Record the metrics of a step.

        Returns True in step `HINT_STEP` if most steps up to it were short.
        `rate` is SGD's learning rate, or None for another inner optimizer.
        """
        length = tf.square(clip.factor) * clip.length
        self.assign(clip_factor=clip.factor, length=length, damping=damping)
        is_early = self.steps <= HINT_STEP
        is_clipped = (clip.factor < LOW_FACTOR) & (clip.length > _MIN_LENGTH)
        self.clipped.assign_add(tf.cast(is_early & is_clipped, tf.int64))
        is_short = is_clipped
        if rate is not None:
            scaled = clip.factor * tf.cast(rate / RATE, clip.factor.dtype)
            is_short |= tf.maximum(scaled, clip.factor) < LOW_SCALED_FACTOR
        self.short.assign_add(tf.cast(is_early & is_short, tf.int64))
        return tf.equal(self.steps, HINT_STEP) & (self.short >= MIN_CLIPPED)

    def assign(self, **values: tf.Tensor) -> None:
        """Assign metrics of a step, by name."""
        for name, value in values.items():
            self._values[name].assign(tf.cast(value, tf.float64))
        self.steps.assign_add(1)

    def values(self) -> dict[str, float]:
        """Return the metrics of the last step; empty before the first step."""
        if int(self.steps.numpy()) == 0:
            return {}
        return {name: float(v.numpy()) for name, v in self._values.items()}
