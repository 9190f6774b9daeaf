"""What one worker keeps: factors and decompositions of its blocks."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.distributed.plan import Plan
from tfkfac.kfac.averages import FactorAverages
from tfkfac.kfac.counters import Counters, Number
from tfkfac.kfac.damping import ADAPTIVE, AdaptiveDamping, LevenbergMarquardt
from tfkfac.kfac.memory import memory_of
from tfkfac.kfac.pending import Pending
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.previous import PREVIOUS, Previous
from tfkfac.kfac.report import StepReport
from tfkfac.saving.entries import Contents, Entry, Spread
from tfkfac.shell.hyperparameters import Hyperparameter
from tfkfac.solvers import SOLVERS, Decomposition, Solver
from tfkfac.training.accumulation import PENDING, Accumulation
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
                placement.settings.inverse_dtype,
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
