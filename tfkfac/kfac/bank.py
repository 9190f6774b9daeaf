"""State of one worker: factors, decompositions and counters of its blocks."""

import contextlib
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.compat.graphs import state_variable, zeros_variable
from tfkfac.compat.variables import Tracked
from tfkfac.distributed.plan import Plan
from tfkfac.kfac.averages import FactorAverages, Pending
from tfkfac.kfac.length import (
    ADAPTIVE,
    AdaptiveDamping,
    LevenbergMarquardt,
    StepReport,
)
from tfkfac.kfac.placement import Placement
from tfkfac.saving.entries import Contents, Entry, Spread
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.solvers import SOLVERS, Decomposition, Solver
from tfkfac.training.accumulation import PENDING, Accumulation, names_of
from tfkfac.training.job import Job


class Preconditioner(Tracked):
    """What one worker keeps of one block.

    Attributes:
        block: The block.
        factors: The averages of its factors, if the worker keeps any.
        decomposition: Their decomposition, if it is a gradient worker.

    Args:
        block: The block.
        solver: The solver.
        names: The factors that the worker keeps.
        preconditions: Whether it is a gradient worker of the block.
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
        report: What the last step did.
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

    def current_damping(
        self, damping: Hyperparameter, clock: tf.Tensor
    ) -> tf.Tensor:
        """The damping, the user's or one that adapts, a float64 scalar."""
        if self.damping is not None:
            return tf.convert_to_tensor(self.damping.value)
        return damping.at(clock)

    def contents(self, placement: Placement, rank: int) -> Contents:
        """What is to be saved.

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
        """What can go wrong, and how often it did."""
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


# What goes wrong where a factor or a decomposition is kept, and what all
# replicas tell each other of it.
FAULTS = {
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}


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
        """Whether others have to be told of each fault of each block."""
        return self._faults() > self.told

    def hear(self, own: tf.Tensor, anywhere: tf.Tensor) -> None:
        """Notes the faults on others; they know this replica's now.

        Args:
            own: The `news` of this replica.
            anywhere: Whether any replica has had these.
        """
        elsewhere = tf.logical_and(anywhere, tf.logical_not(own))
        self.elsewhere.assign_add(tf.cast(elsewhere, tf.int64))
        self.told.assign(self._faults())

    def _faults(self) -> tf.Tensor:
        return tf.stack([getattr(self, name) for name in FAULTS])

    def events(self) -> list[tuple[str, "Everywhere"]]:
        """How often each fault has happened to each block, on any replica."""
        return [
            (
                f"{text} {path}",
                Everywhere(getattr(self, name), self.elsewhere, kind, i),
            )
            for kind, (name, text) in enumerate(FAULTS.items())
            for i, path in enumerate(self.paths)
        ]

    def clocks(self, place: int, spread: Spread) -> list[Entry]:
        """What has been done with a block, to be saved."""
        named = [("observed", self.observed), ("decomposed", self.decomposed)]
        path = self.paths[place]
        return [
            Entry(path, name, Number(numbers, place), spread)
            for name, numbers in named
        ]

    def faults(
        self, place: int, has_factors: bool, has_decomposition: bool
    ) -> list[Entry]:
        """What has gone wrong with a block where it is, to be saved."""
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
            flags: Whether each of all blocks is to be.
        """
        old = self.decomposed
        old.assign(tf.where(flags, tf.zeros_like(old), old))

    def asked(self) -> tf.Tensor:
        """Whether each block has to be decomposed as soon as it can be."""
        return tf.equal(self.decomposed, 0)

    def without_statistics(self) -> tf.Tensor:
        """Whether each block has none yet."""
        return tf.equal(self.observed, 0)

    def to_decompose(self, due: tf.Tensor, asked: tf.Tensor) -> tf.Tensor:
        """Whether each block is to be: never before it has statistics.

        Args:
            due: Whether an interval ends here.
            asked: Whether any worker has asked for each, see `asked`.
        """
        return tf.logical_and(self.observed > 0, tf.logical_or(due, asked))

    def by_position(
        self, flags: Mapping[int, tf.Tensor], otherwise: bool
    ) -> tf.Tensor:
        """Flags of some blocks as one tensor of all.

        Args:
            flags: Scalar bools by position.
            otherwise: What stands for the others.
        """
        rest = tf.constant(otherwise)
        every = [flags.get(i, rest) for i in range(len(self.paths))]
        return tf.stack(every) if every else tf.zeros([0], tf.bool)


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


PREVIOUS = "previous"  # the part of the state that it is


class Previous(Tracked):
    """The update before, of one replica.

    Attributes:
        changes: What was added to each trainable weight.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="previous")
        self._names = names_of(model)
        self.changes = [
            zeros_variable(v.shape, v.dtype, "previous_update")
            for v in model.trainable_variables
        ]

    def reset(self) -> None:
        """Forgets it."""
        for change in self.changes:
            change.assign(tf.zeros_like(change))

    def entries(self) -> list[Entry]:
        """All variables to save."""
        return [
            Entry(path, f"previous_update_{name}", change, part=PREVIOUS)
            for (path, name), change in zip(
                self._names, self.changes, strict=True
            )
        ]


@contextlib.contextmanager
def memory_of(path: str) -> Iterator[None]:
    """Names a layer in the error when there is no memory for it.

    In a graph it is the operations that bear the name, which TensorFlow's
    error says. Eagerly it would be the variables, each of which then has a
    kernel of its own: half a millisecond.

    Args:
        path: Path of the layer.

    Raises:
        MemoryError: If memory was exhausted.
    """
    # A scope's name allows less than a layer's.
    scope = re.sub(r"[^A-Za-z0-9_./-]", "_", f"kfac/{path}")
    eager = tf.executing_eagerly()
    try:
        with contextlib.nullcontext() if eager else tf.name_scope(scope):
            yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise MemoryError(
            f"No memory for the factors of layer '{path}' and their "
            "decomposition. Have them approximated, with a smaller "
            "`max_factor_dim`, or leave the layer to the inner optimizer, with "
            f"skip_layers=['{path}']. {error}"
        ) from error
