"""State of one worker: factors, decompositions and counters of its blocks."""

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.factors import Tensors
from tfkfac.fisher.types import Statistics
from tfkfac.kfac.averages import (
    MAX_ELEMENTS,
    Decomposition,
    FactorAverages,
    Group,
    Momentum,
    PlainMatrix,
    partition,
    plain_matrices,
    update_averages,
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
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}


S = TypeVar("S", bound="Stacked")
# Bools of blocks: their positions, and a vector.
Flags = Sequence[tuple[Sequence[int], tf.Tensor]]


class Stacked(Protocol):
    """State of the blocks of a group."""

    blocks: tuple[Block, ...]
    variables: Sequence[tf.Variable]

    def place(self, members: Mapping[int, Block]) -> None:
        """Set the blocks of the rows, and their positions."""


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
            self._fill_plain(placement)
        blocks, plan = dict(enumerate(placement.blocks)), placement.plan
        old = {same_block_key(x): i for i, x in enumerate(self.blocks)}
        keys = map(same_block_key, placement.blocks)
        kept = {i: old[key] for i, key in enumerate(keys) if key in old}
        self.blocks = placement.blocks
        owned = {i: block for i, block in blocks.items() if plan.owns(rank, i)}
        self.averages = refill(
            self.averages,
            partition(owned, lambda i: tuple(plan.owns(rank, i)), limit),
            lambda members: FactorAverages(
                members, plan.owns(rank, next(iter(members)))
            ),
        )
        # Equal on all workers: other stacks have other rounding errors.
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
        stored = [
            (group, [i for i in group.positions if i in statistics])
            for group in self.averages
        ]
        places = {i for _, positions in stored for i in positions}
        # Other workers store the averages of other blocks.
        others = {i: self.blocks[i] for i in statistics if i not in places}
        groups: list[tuple[FactorAverages | None, list[int]]] = [
            (group, positions) for group, positions in stored if positions
        ]
        groups += [(None, list(x)) for x in partition(others, lambda _: None)]
        order = [i for _, positions in groups for i in positions]
        if not order:
            return tf.constant(0, tf.int64)
        accepted, finite, valid = update_averages(
            groups, self.blocks, statistics, decay, tf.gather(due_flags, order)
        )
        count_each(
            due_flags & ~counters.flags([(order, finite)]),
            counters.rejected,
            counters.paths,
            "statistics are not finite, the factors keep their values.",
        )
        dropped = ~counters.flags([(order, valid)])
        count_each(
            dropped,
            counters.dropped,
            counters.paths,
            "the factors are not finite, their averages restart.",
        )
        counters.request_decomposition(dropped)
        updated = counters.flags([(order, accepted)], otherwise=False)
        updates = tf.cast(updated, tf.int64)
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
                    name: tf.stack([parts[i][name] for i in positions])
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
    factors = tuple(sorted(block.factors.items()))
    return (id(block.layer), block.kind, factors)


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


class Pending(Accumulation):
    """Sums of gradients and statistics over the micro-batches of a step.

    `blocks` are, by position, the blocks observed by this replica.
    """

    def __init__(
        self, steps: int, job: Job, blocks: Mapping[int, Block]
    ) -> None:
        super().__init__(steps, job)
        self._blocks = dict(blocks)
        self._totals = [
            [self._sum(b, name, spec.shape) for name, spec in b.factors.items()]
            for b in blocks.values()
        ]
        self._counts = [
            self._sum(b, "counts", [len(b.factors)]) for b in blocks.values()
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

    def is_for(self, blocks: Mapping[int, Block]) -> bool:
        """True if blocks have the positions, paths and factors of the sums."""
        return [(i, b.path, b.factors) for i, b in blocks.items()] == [
            (i, b.path, b.factors) for i, b in self._blocks.items()
        ]

    def add_statistics(self, statistics: Statistics) -> tf.Tensor:
        """Add the statistics of each block in a micro-batch."""
        for (i, block), totals, counts in self._sums_by_block():
            if i in statistics:
                increments = [statistics[i][name] for name in block.factors]
                for total, statistic in zip(totals, increments, strict=True):
                    total.assign_add(statistic.total)
                counts.assign_add(tf.stack([s.count for s in increments]))
        return tf.constant(0)

    def statistics(self) -> dict[int, dict[str, Statistic]]:
        """Return the sums of the statistics of each block so far."""
        result = {}
        for (i, block), totals, counts in self._sums_by_block():
            row_counts = tf.unstack(tf.convert_to_tensor(counts))
            sums = map(Statistic, map(tf.convert_to_tensor, totals), row_counts)
            result[i] = dict(zip(block.factors, sums, strict=True))
        return result

    def _sums_by_block(
        self,
    ) -> Iterator[tuple[tuple[int, Block], list[Any], Any]]:
        """Return ((position, block), totals, counts) of every block."""
        items = self._blocks.items()
        return zip(items, self._totals, self._counts, strict=True)
