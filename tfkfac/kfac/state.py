"""State of one worker: factors, decompositions and counters of its blocks."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.factors import Tensors
from tfkfac.fisher.types import Statistics
from tfkfac.kfac.averages import (
    Decomposition,
    FactorAverages,
    Group,
    Momentum,
    Pending,
    PlainMatrix,
    check_statistics,
    name_in_memory_errors,
    plain_matrices,
)
from tfkfac.kfac.length import SpectralLength
from tfkfac.kfac.placement import Placement
from tfkfac.linalg.tensors import stacked, unstacked
from tfkfac.saving.entries import Contents, Entry, Row, Spread
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


# Maximum number of weights of a group, and of those whose directions are
# computed at the same time. The memory of a language model with 23 M weights (6
# layers) was 1.48 times that of Adam without this limit and 1.30 times with it,
# when momenta were twice as large.
MAX_ELEMENTS = 1 << 22


# Bools of blocks: their positions, and a vector.
Flags = Sequence[tuple[Sequence[int], tf.Tensor]]


class Preconditioner(Tracked):
    """Decompositions and momenta of blocks with equal factors on one worker.

    An attribute is None if this worker does not store it.
    """

    def __init__(
        self,
        members: Mapping[int, Block],
        solver: Solver,
        preconditions: bool,
        inverse_dtype: tf.DType | None = None,
        has_momentum: bool = False,
    ) -> None:
        super().__init__(name="preconditioner")
        self.decomposition: Decomposition | None = None
        self.momentum: Momentum | None = None
        if preconditions:
            self.decomposition = Decomposition(members, solver, inverse_dtype)
            if has_momentum:
                self.momentum = Momentum(members, solver.section)
        self.place(members)

    def place(self, members: Mapping[int, Block]) -> None:
        """Set the blocks of the rows, and their positions."""
        self.positions, self.blocks = tuple(members), tuple(members.values())
        for group in self.groups:
            group.place(members)

    @property
    def groups(self) -> list[Group]:
        """The stored groups."""
        both = (self.decomposition, self.momentum)
        return [group for group in both if group is not None]


T = TypeVar("T")
S = TypeVar("S", FactorAverages, Preconditioner)


def partition(
    blocks: Mapping[int, Block], key: Callable[[int], Hashable]
) -> list[dict[int, Block]]:
    """Group blocks of equal factors, dtype and `key(position)`."""
    groups: dict[Hashable, dict[int, Block]] = {}
    for i, block in blocks.items():
        factors = tuple(sorted(block.factors.items()))
        full_key = key(i), factors, block.dtype
        groups.setdefault(full_key, {})[i] = block
    return list(groups.values())


def chunks(
    items: Sequence[T], sizes: Sequence[int], limit: int
) -> list[list[T]]:
    """Split items into lists with a sum of sizes up to a limit, or one item."""
    result: list[list[T]] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if not result or total + size > limit:
            result.append([])
            total = 0
        result[-1].append(item)
        total += size
    return result


def _refill(
    old: Sequence[S],
    groups: Sequence[Mapping[int, Block]],
    make: Callable[[Mapping[int, Block]], S],
) -> tuple[S, ...]:
    """Create the state of groups; keep the state of blocks in old groups."""
    places = {
        _same_block_key(block): (group, row)
        for group in old
        for row, block in enumerate(group.blocks)
    }
    result = []
    for members in groups:
        found = [places.get(_same_block_key(b)) for b in members.values()]
        existing = found[0] and found[0][0]
        rows = [(existing, row) for row in range(len(found))]
        if existing and found == rows and len(existing.blocks) == len(rows):
            existing.place(members)
            result.append(existing)
            continue
        with name_in_memory_errors(next(iter(members.values())).path):
            group = make(members)
        for row, place in enumerate(found):
            if place is not None:
                pairs = zip(group.variables, place[0].variables, strict=False)
                for variable, source in pairs:
                    Row(variable, row).assign(Row(source, place[1]).numpy())
        result.append(group)
    return tuple(result)


def _same_block_key(block: Block) -> Hashable:
    """Return the key by which `_refill` finds the state of a block."""
    factors = tuple(sorted(block.factors.items()))
    return (id(block.layer), block.kind, factors)


class State(Tracked):
    """The curvature state of one worker."""

    def __init__(self) -> None:
        super().__init__(name="replica")
        self.blocks: tuple[Block, ...] = ()
        self.averages: tuple[FactorAverages, ...] = ()
        self.preconditioners: tuple[Preconditioner, ...] = ()
        self.counters = Counters(())
        self.pending: Pending | None = None
        self.report = StepReport()
        self.length: SpectralLength | None = None
        self.plain: tuple[PlainMatrix, ...] = ()
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    @property
    def groups(self) -> list[Group]:
        """All stacks of state."""
        groups = [x for p in self.preconditioners for x in p.groups]
        return [*self.averages, *groups]

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
        blocks, plan = dict(enumerate(placement.blocks)), placement.plan
        old = {_same_block_key(x): i for i, x in enumerate(self.blocks)}
        keys = map(_same_block_key, placement.blocks)
        kept = {i: old[key] for i, key in enumerate(keys) if key in old}
        self.blocks = placement.blocks
        owned = {i: block for i, block in blocks.items() if plan.owns(rank, i)}
        self.averages = _refill(
            self.averages,
            partition(owned, lambda i: tuple(plan.owns(rank, i))),
            lambda members: FactorAverages(
                members, plan.owns(rank, next(iter(members)))
            ),
        )
        # All workers have the same groups: sums over other stacks, or in another
        # order, have other rounding errors.
        groups = partition(blocks, lambda i: plan.layers[i].gradient_workers)
        self.preconditioners = _refill(
            self.preconditioners,
            [
                dict(items)
                for members in groups
                for items in chunks(
                    list(members.items()),
                    [math.prod(b.gradient_shape) for b in members.values()],
                    MAX_ELEMENTS,
                )
            ],
            lambda members: Preconditioner(
                members,
                placement.solver,
                plan.preconditions(rank, next(iter(members))),
                placement.distribution.storage_dtype,
                has_momenta,
            ),
        )
        paths = tuple(block.path for block in placement.blocks)
        if self.counters.paths != paths:
            counters = Counters(paths)
            counters.copy_from(self.counters, kept)
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
        updated, finite, valid = [], [], []
        groups = [(x, x.rows_of(statistics)) for x in self.averages]
        stored = {x.positions[row] for x, rows in groups for row in rows}
        others = {i: self.blocks[i] for i in statistics if i not in stored}
        # Other workers store these averages.
        elsewhere = partition(others, lambda i: None)
        for group, positions in [
            *((x, [x.positions[row] for row in rows]) for x, rows in groups),
            *((None, list(members)) for members in elsewhere),
        ]:
            if not positions:
                continue
            specs = self.blocks[positions[0]].factors
            by_name = {
                name: [statistics[i][name] for i in positions] for name in specs
            }
            totals, counts = (
                {
                    name: stacked([getattr(s, field) for s in values])
                    for name, values in by_name.items()
                }
                for field in Statistic._fields
            )
            complete, is_finite = check_statistics(specs, totals, counts)
            is_due = tf.gather(due_flags, positions)
            accepted = is_due & complete & is_finite
            updated.append((positions, accepted))
            if group is not None:
                finite.append((positions, is_finite))
                rows = group.rows_of(positions)
                restarted = group.update(rows, totals, counts, decay, accepted)
                valid.append((positions, restarted))
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
        dampings: tf.Tensor,
    ) -> dict[int, Tensors]:
        """Decompose this worker's factors of the blocks at indices `places`."""
        parts: dict[int, Tensors] = {}
        for group in self.averages:
            rows = group.rows_of(places)
            if rows:
                positions = [group.positions[row] for row in rows]
                with name_in_memory_errors(group.blocks[rows[0]].path):
                    stacks = group.decompose(
                        rows, solver, tf.gather(dampings, positions)
                    )
                tensors = {k: unstacked(x) for k, x in stacks.items()}
                for row, i in enumerate(positions):
                    parts[i] = {k: x[row] for k, x in tensors.items()}
        return parts

    def defer(self, due: tf.Tensor, dampings: tf.Tensor) -> None:
        """Let the decompositions that are due be computed after the step."""
        counters = self.counters
        counters.deferred.assign_add(tf.cast(due, tf.int64))
        counters.dampings.assign(tf.where(due, dampings, counters.dampings))

    def replace_decompositions(
        self,
        parts: Mapping[int, Tensors],
        dampings: tf.Tensor,
        due: tf.Tensor,
    ) -> None:
        """Replace the decompositions that are due and finite."""
        counters = self.counters
        finite = []
        for group in self.preconditioners:
            decomposition = group.decomposition
            rows = decomposition.rows_of(parts) if decomposition else []
            if decomposition is not None and rows:
                positions = [group.positions[row] for row in rows]
                stacks = {
                    name: stacked([parts[i][name] for i in positions])
                    for name in parts[positions[0]]
                }
                flags = decomposition.replace(
                    rows,
                    stacks,
                    tf.gather(dampings, positions),
                    tf.gather(due, positions),
                    group.momentum,
                )
                finite.append((positions, flags))
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
        for i in range(len(placement.blocks)):
            if plan.observes(rank, i):
                shared = plan.shares_clocks
                spread = Spread.REPLICATED if shared else Spread.OWNED
                entries.append(counters.entry("observed", i, spread))
                entries.append(counters.entry("decomposed", i, spread))
            if plan.owns(rank, i):
                entries.append(counters.entry("rejected", i, Spread.OWNED))
            if plan.preconditions(rank, i):
                entries.append(counters.entry("failures", i, Spread.OWNED))
        for group in self.groups:
            entries += group.entries()
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
            unexplained = Row(self.counters.unexplained, i)
            events.append((f"gradients of other passes in {path}", unexplained))
        return events + self.counters.events()


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def local_factors(states: Sequence[State]) -> dict[str, dict[str, np.ndarray]]:
    """Return the factors on local replicas, by layer path and factor name."""
    result: dict[str, dict[str, np.ndarray]] = {}
    for group in (group for state in states for group in state.averages):
        for name, values in group.values().items():
            factor = group.factor_types[name]
            for block, value in zip(
                group.blocks, unstacked(values), strict=True
            ):
                shown = factor.shown(value).numpy()
                result.setdefault(block.path, {})[name] = shown
    paths = [block.path for block in states[0].blocks]
    return {
        path: dict(sorted(result[path].items()))
        for path in paths
        if path in result
    }


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

    def events(self) -> list[tuple[str, "Row"]]:
        """Return the text and count of each fault of each block."""
        return [
            (f"{description} {path}", Row(getattr(self, name), i))
            for name, description in FAULTS.items()
            for i, path in enumerate(self.paths)
        ]

    def entry(self, name: str, place: int, spread: Spread) -> Entry:
        """Return the checkpoint entry of one counter of a block."""
        number = Row(getattr(self, name), place)
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

    def flags(self, flags: Flags, otherwise: bool = True) -> tf.Tensor:
        """Return a bool per block: its flag, or `otherwise` if it has none."""
        if not self.paths:
            return tf.zeros([0], tf.bool)
        place: dict[int, int] = {}
        size = 0
        for positions, _ in flags:
            place |= {i: size + row for row, i in enumerate(positions)}
            size += len(positions)
        order = [place.get(i, size) for i in range(len(self.paths))]
        vectors = [vector for _, vector in flags]
        if order != list(range(size)):
            vectors.append(tf.constant([otherwise]))
        joined = tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]
        return (
            joined if len(vectors) == len(flags) else tf.gather(joined, order)
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
