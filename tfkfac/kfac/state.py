"""State of one worker: factors, decompositions and counters of its blocks."""

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.factors import Tensors
from tfkfac.fisher.types import Statistics
from tfkfac.kfac.averages import (
    MAX_ELEMENTS,
    FactorAverages,
    Group,
    PlainMatrix,
    Preconditioner,
    partition,
    plain_matrices,
    rows_finite,
)
from tfkfac.kfac.length import SpectralLength, StepReport
from tfkfac.kfac.placement import Placement
from tfkfac.linalg.tensors import unstacked
from tfkfac.saving.entries import Contents, Entry, Row, Spread
from tfkfac.saving.slots import Slots
from tfkfac.solvers import Solver
from tfkfac.training.accumulation import Accumulation
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job

# Names of the fault counters, each with its text in the list of events.
FAULTS = {
    "unexplained": "gradients of other passes in",
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}


S = TypeVar("S", FactorAverages, Preconditioner, "Counters")
# Flags of blocks: pairs of the blocks' positions and a vector of bools.
Flags = Sequence[tuple[Sequence[int], tf.Tensor]]


class State(Tracked):
    """The curvature state of one worker."""

    def __init__(self) -> None:
        super().__init__(name="replica")
        self.blocks: tuple[Block, ...] = ()
        self.averages: tuple[FactorAverages, ...] = ()
        self.preconditioners: tuple[Preconditioner, ...] = ()
        self.counters = Counters({})
        self.pending: Pending | None = None
        self.report = StepReport()
        self.length: SpectralLength | None = None
        self.plain: tuple[PlainMatrix, ...] = ()
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    @property
    def groups(self) -> list[Group]:
        """All stacks of state."""
        return [*self.averages, *self.preconditioners]

    def fill(
        self,
        placement: Placement,
        rank: int,
        has_momenta: bool = False,
        limit: int = MAX_ELEMENTS,
    ) -> None:
        """Create the state of each block, or reuse state with an equal key.

        `limit` is the maximum number of elements of a group.
        """
        if has_momenta:
            self.length = self.length or SpectralLength()
            self.length.is_recurrent = any(
                item.is_recurrent and plain_matrices([item])
                for item in placement.registry.leftovers
            )
            existing = {id(matrix.variable): matrix for matrix in self.plain}
            self.plain = tuple(
                existing.get(id(variable)) or PlainMatrix(path, variable)
                for path, variable in plain_matrices(
                    placement.registry.leftovers
                )
            )
        blocks, plan = dict(enumerate(placement.blocks)), placement.plan
        owned = {i: block for i, block in blocks.items() if plan.owns(rank, i)}
        self.averages = refill(
            self.averages,
            partition(owned, lambda i: tuple(plan.owns(rank, i)), limit),
            lambda members: FactorAverages(
                members, plan.owns(rank, next(iter(members)))
            ),
        )
        # Group equally on all workers: rounding errors depend on the stacks.
        groups = partition(
            blocks, lambda i: plan.layers[i].gradient_workers, limit
        )
        self.preconditioners = refill(
            self.preconditioners,
            groups,
            lambda members: Preconditioner(
                members,
                placement.solver,
                plan.preconditions(rank, next(iter(members))),
                placement.distribution.storage_dtype,
                has_momenta,
            ),
        )
        counters = refill([self.counters], [blocks], Counters) if blocks else ()
        self.counters = counters[0] if counters else Counters({})
        self.blocks = placement.blocks

    def accumulate(self, placement: Placement, rank: int, job: Job) -> None:
        """Create the sums over micro-batches; keep sums that fit the blocks."""
        observed = {
            i: block
            for i, block in enumerate(placement.blocks)
            if placement.plan.observes(rank, i)
        }
        old = {} if self.pending is None else self.pending.blocks
        old_keys, new_keys = (
            [(i, b.path, b.factors) for i, b in blocks.items()]
            for blocks in (old, observed)
        )
        if self.pending is None or old_keys != new_keys:
            self.pending = Pending(job, observed)

    def update_averages(
        self, statistics: Statistics, decay: float, due: tf.Tensor
    ) -> None:
        """Update the averages that are due, and count the faults.

        If the update is not due, only blocks without statistics are updated.
        """
        counters = self.counters
        due_flags = tf.logical_or(due, counters.without_statistics())
        groups: list[tuple[FactorAverages | None, list[int]]] = [
            (group, [i for i in group.positions if i in statistics])
            for group in self.averages
        ]
        stored = {i for _, positions in groups for i in positions}
        # Other workers store the averages of other blocks.
        others = {i: self.blocks[i] for i in statistics if i not in stored}
        groups += [(None, list(x)) for x in partition(others, lambda _: None)]
        accepted, finite, valid = [], [], []
        for group, positions in groups:
            if not positions:
                continue
            block = self.blocks[positions[0]]
            totals, counts, traces = {}, {}, []
            for name, spec in block.factors.items():
                parts = [statistics[i][name] for i in positions]
                totals[name] = tf.stack([part.total for part in parts])
                count = tf.stack([part.count for part in parts])
                counts[name] = tf.cast(count, block.dtype)
                # A trace suffices: a sum of outer products has no element
                # larger than its trace, and a row that is not finite makes the
                # trace not finite.
                traces.append(spec.mean_eigenvalue(totals[name]))
            is_finite = rows_finite(traces)
            is_accepted = tf.gather(due_flags, positions) & is_finite
            for count in counts.values():
                is_accepted &= count > 0
            accepted.append((positions, is_accepted))
            # The workers that store a block count its faults.
            if group is not None:
                finite.append((positions, is_finite))
                is_valid = group.update(
                    group.rows_of(positions), totals, counts, is_accepted, decay
                )
                valid.append((positions, is_valid))
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
        updates = tf.cast(counters.flags(accepted, otherwise=False), tf.int64)
        counters.observed.assign_add(updates)
        self.factor_updates.assign_add(tf.minimum(tf.reduce_sum(updates), 1))

    def decompose(
        self, places: Sequence[int], solver: Solver, dampings: tf.Tensor
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

    def replace_decompositions(
        self, parts: Mapping[int, Tensors], dampings: tf.Tensor, due: tf.Tensor
    ) -> None:
        """Replace the decompositions that are due and finite."""
        counters = self.counters
        finite = []
        for group in self.preconditioners:
            rows = group.rows_of(parts) if group.is_stored else []
            if rows:
                positions = [group.positions[row] for row in rows]
                stacks = {
                    name: tf.stack([parts[i][name] for i in positions])
                    for name in parts[positions[0]]
                }
                flags = group.replace(
                    rows,
                    stacks,
                    tf.gather(dampings, positions),
                    tf.gather(due, positions),
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
        count_spread = Spread.REPLICATED if plan.shares_clocks else Spread.OWNED
        for i in range(len(placement.blocks)):
            if plan.observes(rank, i):
                entries.append(counters.entry("observed", i, count_spread))
                entries.append(counters.entry("decomposed", i, count_spread))
            if plan.owns(rank, i):
                entries.append(counters.entry("rejected", i, Spread.OWNED))
            if plan.preconditions(rank, i):
                entries.append(counters.entry("failures", i, Spread.OWNED))
        for stored in (*self.groups, self.pending, *self.plain):
            entries += [] if stored is None else stored.entries()
        by_section: dict[str, list[Slots]] = defaultdict(list)
        by_section[placement.solver.section] = []
        for slots in (self.pending, self.length, *self.plain):
            if slots is not None:
                by_section[slots.section].append(slots)

        def reset(section: str) -> None:
            if section == placement.solver.section:
                counters.request_decomposition(True)
                for group in self.preconditioners:
                    group.reset_momenta()
            for slots in by_section[section]:
                slots.reset()

        return Contents(
            entries,
            counters.paths,
            {name: functools.partial(reset, name) for name in by_section},
        )

    def events(self) -> list[tuple[str, tf.Variable]]:
        """Return the texts and counts of abnormal events."""
        return [("hints on the first steps", self.report.hints)] + [
            (f"{description} {path}", Row(getattr(self.counters, name), i))
            for name, description in FAULTS.items()
            for i, path in enumerate(self.counters.paths)
        ]


def refill(
    old: Sequence[S],
    groups: Sequence[Mapping[int, Block]],
    make: Callable[[Mapping[int, Block]], S],
) -> tuple[S, ...]:
    """Create the state of groups; keep the state of blocks in old groups."""
    places = {
        same_block_key(block): (group, row)
        for group in old
        for row, block in enumerate(group.blocks)
    }
    result = []
    for members in groups:
        old_places = [places.get(same_block_key(b)) for b in members.values()]
        existing = old_places[0][0] if old_places[0] is not None else None
        rows = [(existing, row) for row in range(len(old_places))]
        if (
            existing is not None
            and old_places == rows
            and len(existing.blocks) == len(rows)
        ):
            existing.place(members)
            result.append(existing)
            continue
        with name_in_memory_errors(next(iter(members.values())).path):
            group = make(members)
        for row, place in enumerate(old_places):
            if place is not None:
                pairs = zip(group.variables, place[0].variables, strict=False)
                for variable, source in pairs:
                    Row(variable, row).assign(Row(source, place[1]).numpy())
        result.append(group)
    return tuple(result)


def same_block_key(block: Block) -> Hashable:
    """Return the key by which `refill` finds the state of a block."""
    return (id(block.layer), block.kind, tuple(sorted(block.factors.items())))


@contextlib.contextmanager
def name_in_memory_errors(path: str) -> Iterator[None]:
    """Context manager that adds a layer's path to out-of-memory errors.

    In a graph a name scope does so, as TensorFlow reports operation names.
    Eagerly each unique name would create a kernel (0.5 ms).
    """
    # Replace characters that are not allowed in name scopes.
    scope = re.sub(r"[^A-Za-z0-9_./-]", "_", f"kfac/{path}")
    eager = tf.executing_eagerly()
    try:
        with contextlib.nullcontext() if eager else tf.name_scope(scope):
            yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise MemoryError(
            f"No memory for the factors of layer '{path}' and their "
            "decomposition. Have them approximated, with a smaller "
            "`max_factor_dim`, or leave the layer to the rest optimizer, with "
            f"skip_layers=['{path}']. {error}"
        ) from error


class Counters(Slots):
    """Event counters on one replica; each is a vector with a number per block.

    One variable per counter lets a step update all blocks at once.

    Attributes:
        observed: Factor updates.
        decomposed: Inverse updates, including failures; 0 requests an update.
        unexplained: Gradients that match no recorded backward pass.
        rejected: Statistics that were not finite.
        dropped: Averages that were not finite.
        failures: Decompositions that were not finite.
        plain: Gradients whose preconditioned gradient was invalid.
        deferred: 1 for an inverse that is computed after the current step.
        dampings: Damping of the block in that step.
    """

    def __init__(self, members: Mapping[int, Block]) -> None:
        super().__init__("counters")
        self.place(members)
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

    def place(self, members: Mapping[int, Block]) -> None:
        """Set the blocks, by position."""
        self.blocks = tuple(members.values())
        self.paths = tuple(block.path for block in self.blocks)

    def _counter(self, name: str) -> tf.Variable:
        return self.slot(name, [len(self.paths)], saved=False)

    def entry(self, name: str, place: int, spread: Spread) -> Entry:
        """Return the checkpoint entry of one counter of a block."""
        number = Row(getattr(self, name), place)
        return Entry(self.paths[place], name, number, spread)

    def request_decomposition(self, flags: tf.Tensor | bool) -> None:
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


class Pending(Accumulation):
    """Sums of gradients and statistics over the micro-batches of a step.

    `blocks` are, by position, the blocks observed by this replica.
    """

    def __init__(self, job: Job, blocks: Mapping[int, Block]) -> None:
        super().__init__(job)
        self.blocks = dict(blocks)
        # The total of each factor of a block, then the counts.
        self._sums = [
            [
                *(self._sum(b, k, spec.shape) for k, spec in b.factors.items()),
                self._sum(b, "counts", [len(b.factors)]),
            ]
            for b in blocks.values()
        ]
        self.moments = self.slot(
            "moments",
            (None,),
            "float64",
            spread=Spread.PARTIAL,
            is_finite=False,
        )

    def _sum(self, block: Block, name: str, shape: Sequence[int]) -> Any:
        fields: Any = {"spread": Spread.PARTIAL, "is_finite": False}
        return self.slot(name, shape, block.dtype, layer=block.path, **fields)

    def add_statistics(self, statistics: Statistics) -> None:
        """Add the statistics of each block in a micro-batch."""
        items = zip(self.blocks.items(), self._sums, strict=True)
        for (i, block), (*totals, counts) in items:
            if i in statistics:
                increments = [statistics[i][name] for name in block.factors]
                for total, statistic in zip(totals, increments, strict=True):
                    total.assign_add(statistic.total)
                counts.assign_add(tf.stack([s.count for s in increments]))

    def statistics(self) -> dict[int, dict[str, Statistic]]:
        """Return the sums of the statistics of each block so far."""
        result = {}
        items = zip(self.blocks.items(), self._sums, strict=True)
        for (i, block), (*totals, counts) in items:
            row_counts = tf.unstack(tf.convert_to_tensor(counts))
            sums = map(Statistic, map(tf.convert_to_tensor, totals), row_counts)
            result[i] = dict(zip(block.factors, sums, strict=True))
        return result
