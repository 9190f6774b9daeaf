"""What one worker keeps: factors and decompositions of its blocks."""

from collections.abc import Hashable, Sequence

import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.tracking import Tracked
from tfkfac.kfac.averages import FactorAverages
from tfkfac.kfac.memory import memory_of
from tfkfac.kfac.placement import Placement
from tfkfac.saving.store import Entry, Spread
from tfkfac.solvers import Decomposition, Solver


class Preconditioner(Tracked):
    """What one worker keeps of one block.

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

    def entries(self) -> list[Entry]:
        """All variables to save."""
        path, named = self.block.path, []
        if self.factors is not None:
            averages = zip(
                self.factors.names, self.factors.averages, strict=True
            )
            named += [(f"factor_{name}", average) for name, average in averages]
            named += [
                ("weight", self.factors.weight),
                ("rejected", self.factors.rejected),
            ]
        if self.decomposition is not None:
            tensors = zip(
                self.decomposition.names,
                self.decomposition.tensors,
                strict=True,
            )
            named += [(f"solver_{name}", tensor) for name, tensor in tensors]
            named.append(("failures", self.decomposition.failures))
        # In every mode some worker keeps each of these whole.
        return [Entry(path, name, v, Spread.OWNED) for name, v in named]


class State(Tracked):
    """The curvature state of one worker.

    Attributes:
        preconditioners: What it keeps of each block, in order.
        factor_updates: Number of factor updates so far.
        inverse_updates: Number of updates of the decompositions so far.
    """

    def __init__(self) -> None:
        super().__init__(name="replica")
        self.preconditioners: tuple[Preconditioner, ...] = ()
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    def fill(self, placement: Placement, rank: int) -> None:
        """Makes what is missing for the blocks; keeps what fits."""
        known = {same_shape_key(p.block): p for p in self.preconditioners}
        new = any(same_shape_key(b) not in known for b in placement.blocks)
        if self.preconditioners and new:
            # Nothing is known of the new ones: update at once.
            self.factor_updates.assign(0)
            self.inverse_updates.assign(0)
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

    def entries(self) -> list[Entry]:
        """All variables to save."""
        counters = [
            Entry("", "factor_updates", self.factor_updates),
            Entry("", "inverse_updates", self.inverse_updates),
        ]
        return counters + [
            entry for p in self.preconditioners for entry in p.entries()
        ]

    def events(self) -> list[tuple[str, tf.Variable]]:
        """What can go wrong, and how often it did."""
        events = []
        for p in self.preconditioners:
            if p.factors is not None:
                text = f"statistics not finite in {p.block.path}"
                events.append((text, p.factors.rejected))
            if p.decomposition is not None:
                text = f"failed decompositions of {p.block.path}"
                events.append((text, p.decomposition.failures))
        return events


def same_shape_key(block: Block) -> Hashable:
    """Key under which a block's state can be kept over a new `attach`."""
    factors = tuple(sorted(block.factors.items()))
    return (id(block.layer), block.kind, factors)
