"""State of one worker: factors, decompositions and counters of its blocks."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.functions import each, fields, flags
from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.distributed.plan import Plan
from tfkfac.factors import Tensors
from tfkfac.kfac.averages import FactorAverages, Pending, memory_of, quality
from tfkfac.kfac.length import (
    ADAPTIVE,
    PREVIOUS,
    AdaptiveDamping,
    LevenbergMarquardt,
    Previous,
    StepReport,
)
from tfkfac.kfac.placement import Placement
from tfkfac.saving.entries import Contents, Entry, Spread
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.solvers import SOLVERS, Decomposition, Solver
from tfkfac.training.accumulation import PENDING, Accumulation
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job

T = TypeVar("T")

# What goes wrong where a factor or a decomposition is kept, and what all
# replicas tell each other of it.
FAULTS = {
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}


class Preconditioner(Tracked):
    """Factors and decomposition of one block, as far as a worker has them.

    Attributes:
        block: The block.
        factors: The averages of its factors, if the worker keeps any.
        decomposition: Their decomposition, if it is a gradient worker.

    Args:
        block: The block.
        solver: The solver.
        names: The factors that the worker keeps.
        preconditions: True if it is a gradient worker of the block.
        inverse_dtype: Dtype of the decomposition; None is the block's.
    """

    def __init__(
        self,
        block: Block,
        solver: Solver,
        names: Sequence[str],
        preconditions: bool,
        inverse_dtype: tf.DType | None = None,
    ) -> None:
        super().__init__(name="preconditioner")
        self.block = block
        self.factors: FactorAverages | None = None
        self.decomposition: Decomposition | None = None
        with memory_of(block.path):
            if names:
                self.factors = FactorAverages(block, names)
            if preconditions:
                self.decomposition = Decomposition(solver, block, inverse_dtype)

    def entries(self, part: str) -> list[Entry]:
        """Its variables to save.

        Args:
            part: The part of the state that decompositions are.
        """
        path, solved = self.block.path, self.decomposition
        entries: list[Entry] = []
        if self.factors is not None:
            entries = self.factors.entries(path)
        if solved is not None:
            named = zip(solved.names, solved.tensors, strict=True)
            entries += [
                Entry(path, f"solver_{name}", tensor, Spread.OWNED, part)
                for name, tensor in named
            ]
        return entries


class State(Tracked):
    """The curvature state of one worker.

    Attributes:
        preconditioners: What it keeps of each block, in order.
        counters: What has happened to them.
        factor_updates: Number of factor updates so far.
        inverse_updates: Number of steps that have renewed decompositions.
        pending: The micro-batches of the next step, if there are any.
        report: Numbers of the last step.
        previous: The update before, if the next one is made of it.
        damping: The damping, if it adapts.
    """

    def __init__(self) -> None:
        super().__init__(name="replica")
        self.preconditioners: tuple[Preconditioner, ...] = ()
        self.counters = Counters(())
        self.pending: Pending | None = None
        self.report = StepReport()
        self.previous: Previous | None = None
        self.damping: AdaptiveDamping | None = None
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    def fill(self, placement: Placement, rank: int) -> None:
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
            )
            for i, block in enumerate(placement.blocks)
        )
        for kept, block in zip(
            self.preconditioners, placement.blocks, strict=True
        ):
            kept.block = block  # of this registry, whose summary it is in
        self._fill_counters({id(p): i for i, p in enumerate(before)})

    def _fill_counters(self, before: Mapping[int, int]) -> None:
        """Keeps the numbers of the blocks that were there before."""
        paths = [p.block.path for p in self.preconditioners]
        if list(self.counters.paths) == paths:
            return
        places = {
            i: before[id(p)]
            for i, p in enumerate(self.preconditioners)
            if id(p) in before
        }
        counters = Counters(paths)
        counters.take(self.counters, places)
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
            self.pending = Pending(Accumulation(steps, job), observed)

    def take_quadratic_steps(self, model: keras.Model, damping: Any) -> None:
        """Makes room for the update before, and for damping that adapts."""
        if self.previous is None:
            self.previous = Previous(model)
        if self.damping is None and isinstance(damping, LevenbergMarquardt):
            self.damping = AdaptiveDamping(damping)

    @property
    def averages(self) -> list[FactorAverages | None]:
        """The factors of each block, None where others keep them."""
        return [one.factors for one in self.preconditioners]

    @property
    def decompositions(self) -> list[Decomposition | None]:
        """The decomposition of each block, None where others keep it."""
        return [one.decomposition for one in self.preconditioners]

    def update_averages(
        self,
        statistics: Mapping[int, Mapping[str, Statistic]],
        decay: float,
        due: tf.Tensor,
    ) -> tf.Tensor:
        """Moves the averages that this worker keeps.

        Args:
            statistics: The statistics of the blocks of a step, by position.
            decay: Weight of the old averages.
            due: Scalar bool, true if an interval ends here. A block that has
                no statistics yet takes its first ones in any case.

        Returns:
            Scalar int64, 0 if no block has taken any, else 1.
        """
        counters = self.counters
        every = tf.logical_or(due, counters.without_statistics())
        wanted = tf.unstack(every)
        new = [statistics.get(i) for i in range(len(wanted))]
        taken, finite, healthy = fields(
            each(FactorAverages.update, self.averages, new, decay, wanted), 3
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
        self, mine: Sequence[bool], solver: Solver, damping: tf.Tensor
    ) -> dict[int, Tensors]:
        """Decomposes the factors that this worker keeps of some blocks.

        Args:
            mine: True for these blocks.
            solver: The solver.
            damping: The damping.

        Returns:
            The parts of each block, by position.
        """
        averages = _where(mine, self.averages)
        found = each(
            FactorAverages.decompose,
            averages,
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
        """Replaces the decompositions of this worker by new ones that are good.

        Args:
            parts: What was made of the blocks' factors, by position.
            damping: The damping.
            wanted: A bool for each block, true if it is to have a new one.
        """
        counters = self.counters
        column = [parts.get(i) for i in range(len(counters.paths))]
        good = each(
            Decomposition.replace,
            self.decompositions,
            column,
            damping,
            tf.unstack(wanted),
        )
        count_each(
            wanted & ~flags(good, otherwise=True),
            counters.failures,
            counters.paths,
            "the decomposition failed, the last good one stays in use; a "
            "larger damping may help.",
        )
        counters.decomposed.assign_add(tf.cast(wanted, tf.int64))

    def current_damping(
        self, damping: Hyperparameter, clock: tf.Tensor
    ) -> tf.Tensor:
        """The damping, the user's or one that adapts, a float64 scalar."""
        if self.damping is not None:
            return tf.convert_to_tensor(self.damping.value)
        return damping.at(clock)

    def contents(self, placement: Placement, rank: int) -> Contents:
        """Entries to be saved, and the sections of a file.

        Args:
            placement: Who does what of the blocks.
            rank: The worker.
        """
        plan = placement.plan
        solved = solver_name(placement.solver)
        entries = self._clocks(plan)
        for i, one in enumerate(self.preconditioners):
            if plan.observes(rank, i):
                shared = plan.shares_clocks
                spread = Spread.REPLICATED if shared else Spread.OWNED
                entries += self.counters.clocks(i, spread)
            entries += self.counters.faults(
                i, one.factors is not None, one.decomposition is not None
            )
            entries += one.entries(solved)
        parts = {solved: self.counters.decompose_anew}
        if self.pending is not None:
            entries += self.pending.entries()
            parts[PENDING] = self.pending.reset
        if self.previous is not None:
            entries += self.previous.entries()
            parts[PREVIOUS] = self.previous.reset
        if self.damping is not None:
            entries += self.damping.entries()
            parts[ADAPTIVE] = self.damping.reset
        layers = tuple(block.path for block in placement.blocks)
        return Contents(entries, layers, parts)

    def _clocks(self, plan: Plan) -> list[Entry]:
        # Owners that learn from their own batches alone count for themselves.
        spread = Spread.REPLICATED if plan.shares_clocks else Spread.EACH
        return [
            Entry("", "factor_updates", self.factor_updates, spread),
            Entry("", "inverse_updates", self.inverse_updates, spread),
        ]

    def events(self) -> list[tuple[str, tf.Variable]]:
        """Things that can go wrong, with the number of times that they did."""
        events = [
            ("times that kl_clip ruled the first steps", self.report.hints),
            ("times that the loss looked like a sum", self.report.sums),
            ("quadratic models not finite", self.report.lost),
        ]
        if self.damping is not None:
            events.append(("steps rejected", self.damping.rejected))
        for i, path in enumerate(self.counters.paths):
            unexplained = Number(self.counters.unexplained, i)
            events.append((f"gradients of other passes in {path}", unexplained))
        return events + self.counters.events()


def _where(mine: Sequence[bool], column: Sequence[T | None]) -> list[T | None]:
    """A column with None where there is no flag."""
    return [
        one if flag else None for flag, one in zip(mine, column, strict=True)
    ]


def solver_name(solver: Solver) -> str:
    """The part of the state that decompositions by a solver are."""
    return next(n for n, kind in SOLVERS.items() if type(solver) is kind)


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


class Counters(Tracked):
    """One number for each block of a replica, by position.

    The numbers of all blocks are in one variable of each kind: a step reads
    and raises them all at once.

    Args:
        paths: The blocks' paths.

    Attributes:
        observed: Statistics taken so far.
        decomposed: Decompositions so far, the failed ones too.
        unexplained: Gradients that no recorded pass explains.
        rejected: Statistics that were not finite.
        dropped: Averages that were not finite.
        failures: Failed decompositions.
        plain: Gradients that were not preconditioned, as the result was wrong.
        told: Numbers of `FAULTS` that the other replicas know of.
        elsewhere: Steps with such a fault on others alone.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(name="counters")
        self.paths = tuple(paths)
        self.observed = self._zeros("observed")
        self.decomposed = self._zeros("decomposed")
        self.unexplained = self._zeros("unexplained_gradients")
        self.rejected = self._zeros("rejected_statistics")
        self.dropped = self._zeros("dropped_factors")
        self.failures = self._zeros("failed_decompositions")
        self.plain = self._zeros("plain_gradients")
        kinds = len(FAULTS)
        self.told = self._zeros("told_faults", kinds)
        self.elsewhere = self._zeros("faults_elsewhere", kinds)

    def _zeros(self, name: str, *kinds: int) -> tf.Variable:
        zeros = tf.zeros([*kinds, len(self.paths)], tf.int64)
        return state_variable(zeros, "int64", name)

    def _all(self) -> tuple[tf.Variable, ...]:
        return (
            self.observed,
            self.decomposed,
            self.unexplained,
            self.rejected,
            self.dropped,
            self.failures,
            self.plain,
        )

    def take(self, other: "Counters", places: Mapping[int, int]) -> None:
        """Takes over numbers of blocks that stay.

        Args:
            other: Other counters.
            places: Their places there, by position here.
        """
        for mine, theirs in zip(self._all(), other._all(), strict=True):
            for i, place in places.items():
                Number(mine, i).assign(theirs[place])
        for i, place in places.items():
            self.told[:, i].assign(other.told[:, place])
            self.elsewhere[:, i].assign(other.elsewhere[:, place])

    def news(self) -> tf.Tensor:
        """Bools by fault and block, true for faults that others do not know."""
        return self._faults() > self.told

    def hear(self, own: tf.Tensor, anywhere: tf.Tensor) -> None:
        """Notes the faults on others; they know this replica's now.

        Args:
            own: The `news` of this replica.
            anywhere: Bools by fault and block, true if any replica has had it.
        """
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

    def clocks(self, place: int, spread: Spread) -> list[Entry]:
        """Entries of what has been done with a block."""
        named = [("observed", self.observed), ("decomposed", self.decomposed)]
        path = self.paths[place]
        return [
            Entry(path, name, Number(numbers, place), spread)
            for name, numbers in named
        ]

    def faults(
        self, place: int, has_factors: bool, has_decomposition: bool
    ) -> list[Entry]:
        """Entries of the faults of a block where it is."""
        named = [("rejected", self.rejected)] * has_factors
        named += [("failures", self.failures)] * has_decomposition
        path = self.paths[place]
        return [
            Entry(path, name, Number(numbers, place), Spread.OWNED)
            for name, numbers in named
        ]

    def decompose_anew(self) -> None:
        """Forgets that there have been decompositions."""
        self.decomposed.assign(tf.zeros_like(self.decomposed))

    def ask(self, flags: tf.Tensor) -> None:
        """Has some blocks decomposed anew in the next step.

        Args:
            flags: A bool for each block.
        """
        old = self.decomposed
        old.assign(tf.where(flags, tf.zeros_like(old), old))

    def asked(self) -> tf.Tensor:
        """A bool for each block, true if it has no decomposition yet."""
        return tf.equal(self.decomposed, 0)

    def without_statistics(self) -> tf.Tensor:
        """A bool for each block, true if it has none yet."""
        return tf.equal(self.observed, 0)

    def to_decompose(self, due: tf.Tensor, asked: tf.Tensor) -> tf.Tensor:
        """A bool for each block: true if due or asked for, and with statistics.

        Args:
            due: Scalar bool, true if an interval ends here.
            asked: A bool for each block, true if a worker asks for it.
        """
        return tf.logical_and(self.observed > 0, tf.logical_or(due, asked))

    def flags(
        self, known: Mapping[int, tf.Tensor | None], otherwise: bool
    ) -> tf.Tensor:
        """Scalar bools of some blocks as one vector of all.

        Args:
            known: The bools by position, None where there is none.
            otherwise: What stands for these and all others.
        """
        column = [known.get(i) for i in range(len(self.paths))]
        return flags(column, otherwise)


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
