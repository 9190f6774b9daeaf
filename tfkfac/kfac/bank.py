"""State of one worker: factors, decompositions and counters of its blocks."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.functions import each, fields, flags
from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.factors import Tensors
from tfkfac.kfac.averages import (
    Decomposition,
    FactorAverages,
    Momentum,
    Pending,
    memory_of,
    quality,
)
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.settings import RATE
from tfkfac.saving.entries import Contents, Entry, Spread
from tfkfac.saving.slots import Slots
from tfkfac.solvers import Solver
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job

# What goes wrong where a factor or a decomposition is kept, and what all
# replicas tell each other of it.
FAULTS = {
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}
_Section = TypeVar("_Section", bound=Slots)


class Preconditioner(Tracked):
    """Averages, decomposition and momentum of a block that a worker has."""

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
        with memory_of(block.path):
            if names:
                self.factors = FactorAverages(block, names)
            if preconditions:
                self.decomposition = Decomposition(solver, block, inverse_dtype)
                self.momentum = Momentum(block) if has_momentum else None

    def entries(self) -> list[Entry]:
        """Its variables to save, by the path that the block has now."""
        return [
            dataclasses.replace(entry, layer=self.block.path)
            for kept in (self.factors, self.decomposition, self.momentum)
            if kept is not None
            for entry in kept.entries()
        ]


class State(Tracked):
    """The curvature state of one worker.

    Attributes:
        preconditioners: Factors and decompositions of each block, in order.
        pending: The micro-batches of the next step, if there are any.
        sections: What the kind of step keeps.
        inverse_updates: Number of steps that have renewed decompositions.
    """

    def __init__(self) -> None:
        super().__init__(name="replica")
        self.preconditioners: tuple[Preconditioner, ...] = ()
        self.counters = Counters(())
        self.pending: Pending | None = None
        self.report = StepReport()
        self.sections: tuple[Slots, ...] = ()
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    def section(self, type_: type[_Section]) -> _Section:
        """Return the section of a class."""
        return next(s for s in self.sections if isinstance(s, type_))

    def fill(
        self, placement: Placement, rank: int, has_momenta: bool = False
    ) -> None:
        """Makes what is missing for the blocks; keeps what fits."""
        before = self.preconditioners
        known = {same_shape_key(p.block): p for p in before}
        self.preconditioners = tuple(
            known.get(same_shape_key(block))
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
        old = {id(p): i for i, p in enumerate(before)}
        stay = {}
        for i, block in enumerate(placement.blocks):
            kept = self.preconditioners[i]
            kept.block = block  # of this registry, whose summary it is in
            if id(kept) in old:
                stay[i] = old[id(kept)]
        paths = tuple(block.path for block in placement.blocks)
        if self.counters.paths != paths:
            counters = Counters(paths)
            counters.take(self.counters, stay)
            self.counters = counters

    def accumulate(
        self, steps: int, placement: Placement, rank: int, job: Job
    ) -> None:
        """Makes room for the micro-batches of a step."""
        observed = {
            i: block
            for i, block in enumerate(placement.blocks)
            if placement.plan.observes(rank, i)
        }
        if self.pending is None or not self.pending.is_for(observed):
            self.pending = Pending(steps, job, observed)

    def update_averages(
        self,
        statistics: Mapping[int, Mapping[str, Statistic]],
        decay: float,
        due: tf.Tensor,
    ) -> tf.Tensor:
        """Moves the averages that this worker keeps, by statistics by position.

        If it is not due, only those of blocks that have no statistics yet.

        Returns:
            Scalar int64, 0 if no block has taken any, else 1.
        """
        counters = self.counters
        every = tf.logical_or(due, counters.without_statistics())
        wanted = tf.unstack(every)
        averages = [one.factors for one in self.preconditioners]
        new = [statistics.get(i) for i in range(len(wanted))]
        taken, finite, healthy = fields(
            each(FactorAverages.update, averages, new, decay, wanted), 3
        )
        for i, named in statistics.items():
            one = self.preconditioners[i]
            if one.factors is None:  # others keep them
                full, good = quality(one.block.factors, named)
                taken[i] = wanted[i] & full & good
        count_each(
            every & ~flags(finite, otherwise=True),
            counters.rejected,
            counters.paths,
            "statistics are not finite, the factors keep their values.",
        )
        dropped = ~flags(healthy, otherwise=True)
        count_each(
            dropped,
            counters.dropped,
            counters.paths,
            "the factors are not finite, they are gathered anew.",
        )
        counters.ask(dropped)
        updates = tf.cast(flags(taken, otherwise=False), tf.int64)
        counters.observed.assign_add(updates)
        return tf.minimum(tf.reduce_sum(updates), 1)

    def decompose(
        self, places: Sequence[int], solver: Solver, damping: tf.Tensor
    ) -> dict[int, Tensors]:
        """Decomposes the factors kept of some blocks; parts by position."""
        found = each(
            FactorAverages.decompose,
            [
                one.factors if i in places else None
                for i, one in enumerate(self.preconditioners)
            ],
            solver,
            damping,
            around=lambda i: memory_of(self.counters.paths[i]),
        )
        parts = {i: made for i, made in enumerate(found) if made is not None}
        for i, made in parts.items():
            known = solver.all_parts(self.preconditioners[i].block.factors)
            for name, tensor in made.items():
                tensor.set_shape(known[name].shape)
        return parts

    def replace_decompositions(
        self,
        parts: Mapping[int, Tensors],
        damping: tf.Tensor,
        wanted: tf.Tensor,
    ) -> None:
        """Replaces wanted decompositions of this worker by new, good ones."""
        counters = self.counters
        good = each(
            Decomposition.replace,
            [one.decomposition for one in self.preconditioners],
            [parts.get(i) for i in range(len(self.preconditioners))],
            damping,
            tf.unstack(wanted),
        )
        each(
            Decomposition.renew,
            [one.decomposition for one in self.preconditioners],
            [
                one.momentum if i in parts else None
                for i, one in enumerate(self.preconditioners)
            ],
        )
        count_each(
            wanted & ~flags(good, otherwise=True),
            counters.failures,
            counters.paths,
            "the decomposition failed, the last good one stays in use; a "
            "larger damping may help.",
        )
        counters.decomposed.assign_add(tf.cast(wanted, tf.int64))

    def contents(self, placement: Placement, rank: int) -> Contents:
        """Entries to be saved, and the sections of a file."""
        plan, counters = placement.plan, self.counters
        # Owners that learn from their own batches alone count for themselves.
        spread = Spread.REPLICATED if plan.shares_clocks else Spread.EACH
        entries = [
            Entry("", "factor_updates", self.factor_updates, spread),
            Entry("", "inverse_updates", self.inverse_updates, spread),
        ]
        for i, one in enumerate(self.preconditioners):
            if plan.observes(rank, i):
                shared = plan.shares_clocks
                spread = Spread.REPLICATED if shared else Spread.OWNED
                entries.append(counters.entry("observed", i, spread))
                entries.append(counters.entry("decomposed", i, spread))
            if one.factors is not None:
                entries.append(counters.entry("rejected", i, Spread.OWNED))
            if one.decomposition is not None:
                entries.append(counters.entry("failures", i, Spread.OWNED))
            entries += one.entries()
        resets: dict[str, list[Callable[[], None]]] = defaultdict(list)
        resets[placement.solver.name].append(counters.decompose_anew)
        pending = [] if self.pending is None else [self.pending]
        for section in (*pending, *self.sections):
            entries += section.entries()
        momenta = [one.momentum for one in self.preconditioners]
        for slots in (*pending, *self.sections, *filter(None, momenta)):
            resets[slots.section].append(slots.reset)
        layers = tuple(block.path for block in placement.blocks)
        parts = {part: _all_of(found) for part, found in resets.items()}
        return Contents(entries, layers, parts)

    def events(self) -> list[tuple[str, tf.Variable]]:
        """Things that can go wrong, with the number of times that they did."""
        events = [
            ("times that kl_clip ruled the first steps", self.report.hints),
        ]
        for i, path in enumerate(self.counters.paths):
            unexplained = Number(self.counters.unexplained, i)
            events.append((f"gradients of other passes in {path}", unexplained))
        return events + self.counters.events()


def _all_of(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """A function that makes some calls."""

    def call() -> None:
        for one in calls:
            one()

    return call


def kept_factors(states: Sequence[State]) -> dict[str, dict[str, np.ndarray]]:
    """The factors that the replicas of this process keep, by layer path."""
    kept = {}
    replicas = [state.preconditioners for state in states]
    for copies in zip(*replicas, strict=True):
        found = {
            name: one.block.factors[name].shown(value).numpy()
            for one in copies
            if one.factors is not None
            for name, value in one.factors.values().items()
        }
        if found:
            kept[copies[0].block.path] = dict(sorted(found.items()))
    return kept


def same_shape_key(block: Block) -> Hashable:
    """Key under which a block's state can be kept over a new `attach`."""
    factors = tuple(sorted(block.factors.items()))
    return (id(block.layer), block.kind, factors)


class Counters(Slots):
    """One number for each block of a replica, by position.

    The numbers of all blocks are in one variable of each kind: a step reads
    and raises them all at once.

    Attributes:
        observed: Statistics taken so far.
        decomposed: Decompositions so far, the failed ones too.
        unexplained: Gradients that no recorded pass explains.
        rejected: Statistics that were not finite.
        dropped: Averages that were not finite.
        plain: Gradients that were not preconditioned, as the result was wrong.
        told: Numbers of `FAULTS` that the other replicas know of.
        elsewhere: Steps with such a fault on others alone.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__("counters")
        self.paths = tuple(paths)
        self.observed = self._numbers("observed")
        self.decomposed = self._numbers("decomposed")
        self.unexplained = self._numbers("unexplained_gradients")
        self.rejected = self._numbers("rejected_statistics")
        self.dropped = self._numbers("dropped_factors")
        self.failures = self._numbers("failed_decompositions")
        self.plain = self._numbers("plain_gradients")
        self.told = self._numbers("told_faults", len(FAULTS))
        self.elsewhere = self._numbers("faults_elsewhere", len(FAULTS))

    def _numbers(self, name: str, *kinds: int) -> tf.Variable:
        return self.slot(name, [*kinds, len(self.paths)], saved=False)

    def take(self, other: "Counters", places: Mapping[int, int]) -> None:
        """Takes over numbers of blocks; their places there, by those here."""
        for mine, theirs in zip(self.variables, other.variables, strict=True):
            numbers = mine.numpy()
            for here, there in places.items():
                numbers[..., here] = theirs.numpy()[..., there]
            mine.assign(numbers)

    def news(self) -> tf.Tensor:
        """Bools by fault and block, true for faults that others do not know."""
        return self._faults() > self.told

    def hear(self, own: tf.Tensor, anywhere: tf.Tensor) -> None:
        """Notes the faults on others; they know the own `news` now."""
        elsewhere = tf.logical_and(anywhere, tf.logical_not(own))
        self.elsewhere.assign_add(tf.cast(elsewhere, tf.int64))
        self.told.assign(self._faults())

    def _faults(self) -> tf.Tensor:
        return tf.stack([getattr(self, name) for name in FAULTS])

    def events(self) -> list[tuple[str, "Everywhere"]]:
        """Number of each fault of each block, on any replica."""
        return [
            (
                f"{text} {path}",
                Everywhere(getattr(self, name), self.elsewhere, kind, i),
            )
            for kind, (name, text) in enumerate(FAULTS.items())
            for i, path in enumerate(self.paths)
        ]

    def entry(self, name: str, place: int, spread: Spread) -> Entry:
        """Entry of one number of a block."""
        number = Number(getattr(self, name), place)
        return Entry(self.paths[place], name, number, spread)

    def decompose_anew(self) -> None:
        """Forgets that there have been decompositions."""
        self.decomposed.assign(tf.zeros_like(self.decomposed))

    def ask(self, flags: tf.Tensor) -> None:
        """Has some blocks decomposed anew in the next step."""
        old = self.decomposed
        old.assign(tf.where(flags, tf.zeros_like(old), old))

    def without_statistics(self) -> tf.Tensor:
        """A bool for each block, true if it has none yet."""
        return tf.equal(self.observed, 0)

    def flags(self, known: Mapping[int, tf.Tensor | None]) -> tf.Tensor:
        """Bools of some blocks, by position, as one vector; true elsewhere."""
        column = [known.get(i) for i in range(len(self.paths))]
        return flags(column, otherwise=True)


class Number:
    """One number of a variable, to be saved and loaded as one by itself."""

    def __init__(self, numbers: tf.Variable, place: int) -> None:
        self._numbers = numbers
        self._place = place
        self.shape, self.dtype = tf.TensorShape([]), numbers.dtype

    def numpy(self) -> int:
        """Returns the number."""
        return self._numbers.numpy()[self._place]

    def assign(self, value: tf.Tensor) -> None:
        """Changes the number."""
        self._numbers.assign(
            tf.tensor_scatter_nd_update(self._numbers, [[self._place]], [value])
        )


class Everywhere(NamedTuple):
    """A number of a fault of a block on this replica, and on others alone."""

    own: tf.Variable
    elsewhere: tf.Variable
    kind: int
    place: int

    def numpy(self) -> int:
        """Returns their sum."""
        others = self.elsewhere.numpy()[self.kind, self.place]
        return int(self.own.numpy()[self.place] + others)


class Clip(NamedTuple):
    """Clip of one step."""

    factor: tf.Tensor
    """Factor on the preconditioned gradients."""
    length: tf.Tensor
    """The squared length of the step before."""


# What may be said of a step; what is not is NaN.
_NAMES = ("clip_factor", "length", "damping")
# The clip rules the first steps if so many of them keep less than this share
# of their length, and would have had more than this squared Fisher length.
FIRST, MANY, LITTLE, _LONG = 20, 12, 0.1, 2.0
# Share of the length, and of a step with the default learning rate, that
# suffices where inputs are far from unit scale. On raw pixels, dense layers of
# 64 units keep 0.1 to 0.15 from step 6 on.
SHORT = 0.25


class StepReport(Slots):
    """Numbers of the last step, in variables of one replica.

    Attributes:
        steps: Number of steps so far.
        clipped: Number of the first of them that the clip left little of.
        short: Number of the first steps that keep less than `SHORT` of their
            length.
        hints: 1 once the hint has been given.
        largest_rate: Largest learning rate of the inner optimizer's schedule.
    """

    def __init__(self) -> None:
        super().__init__("report")
        self.steps = self.slot("reported_steps", saved=False)
        self.clipped = self.slot("clipped_steps", saved=False)
        self.short = self.slot("short_steps", saved=False)
        self.hints = self.slot("clip_hints", saved=False)
        self.largest_rate = self.slot(
            "largest_scheduled_rate", (), "float64", saved=False
        )
        self._values = {
            name: self.slot(name, (), "float64", math.nan, saved=False)
            for name in _NAMES
        }

    def note(
        self,
        clip: Clip,
        damping: tf.Tensor,
        rate: tf.Tensor | None,
    ) -> tf.Tensor:
        """Record a step.

        `rate` is the learning rate of SGD, of a schedule the largest, or None.

        Returns:
            Scalar bool, true in step `FIRST` if most steps before are short.
        """
        length = tf.square(clip.factor) * clip.length
        self.assign(clip_factor=clip.factor, length=length, damping=damping)
        early = self.steps <= FIRST
        long = (clip.factor < LITTLE) & (clip.length > _LONG)
        self.clipped.assign_add(tf.cast(early & long, tf.int64))
        short = long
        if rate is not None:
            scaled = clip.factor * tf.cast(rate / RATE, clip.factor.dtype)
            short |= tf.maximum(scaled, clip.factor) < SHORT
        self.short.assign_add(tf.cast(early & short, tf.int64))
        return tf.equal(self.steps, FIRST) & (self.short >= MANY)

    def assign(self, **values: tf.Tensor) -> None:
        """Notes numbers of a step, by name."""
        for name, value in values.items():
            self._values[name].assign(tf.cast(value, tf.float64))
        self.steps.assign_add(1)

    def values(self) -> dict[str, float]:
        """The last step's numbers, by name; none before the first step."""
        if int(self.steps.numpy()) == 0:
            return {}
        every = {name: float(v.numpy()) for name, v in self._values.items()}
        return {name: v for name, v in every.items() if not math.isnan(v)}
