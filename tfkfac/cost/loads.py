"""Per-worker load of a plan."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from tfkfac.blocks import Block
from tfkfac.distributed.collectives import all_reduce_bytes
from tfkfac.distributed.plan import Plan
from tfkfac.factors.base import Wire
from tfkfac.solvers import Solver, most_rows

Numbers = np.ndarray  # one of each worker


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """Bytes and multiplications of one block, whichever workers have it.

    Attributes:
        factors: Bytes of each average that an owner keeps, by name.
        decomposition: Bytes that each gradient worker keeps.
        statistics: Bytes that all workers add up of a batch.
        parts: Bytes that the owner of each factor sends when it is decomposed.
        gradient: Bytes of the preconditioned gradient.
        decompositions: About n^3 for each factor, and its elements, by name.
        precondition: Multiplications of the gradient with the decomposition.
        largest_rows: Up to how many rows they are preconditioned in its place;
            0 if never.
        row: Multiplications of one row, beside the products with other rows.
        width: Multiplications of two rows that meet in `<P, W>`.
    """

    factors: Mapping[str, int]
    decomposition: int
    statistics: int
    parts: Mapping[str, int]
    gradient: int
    decompositions: Mapping[str, tuple[int, int]]
    precondition: int
    largest_rows: int
    row: int
    width: int

    @classmethod
    def of(
        cls,
        block: Block,
        solver: Solver,
        wire: Wire,
        workers: int,
        beside: int = 0,
    ) -> Self:
        """Counts the cost of a block whose gradients `workers` add up.

        Some numbers travel `beside` the preconditioned one.
        """
        factors, own = block.factors, block.dtype.size
        dtype = wire.inverse_dtype or block.dtype
        statistics = 0
        for kind in factors.values():
            total = math.prod(wire.shape(kind.storage))
            statistics += total * (wire.factor_dtype or block.dtype).size
            # And the number of rows, of the block's dtype, and the units of
            # half precision.
            units = math.prod(kind.storage.scale_shape)
            statistics += own * (1 + units * (wire.factor_dtype is not None))
        parts = {}
        for name in factors:
            sent = solver.parts(factors, name).values()
            elements = sum(math.prod(wire.shape(part)) for part in sent)
            parts[name] = elements * dtype.size
        *stack, inputs, outputs = block.gradient_shape
        times = {"A": outputs, "G": inputs}
        one = {n: f.multiplications for n, f in factors.items()}
        matrix = sum(one[name] * times[name] for name in factors)
        takes_rows = solver.takes_rows and not stack and "A" in factors
        kept = solver.kept(factors).values()
        return cls(
            factors={n: kind.elements * own for n, kind in factors.items()},
            decomposition=sum(part.elements for part in kept) * dtype.size,
            statistics=statistics,
            parts=parts,
            gradient=(math.prod(block.gradient_shape) + beside) * own,
            decompositions={
                n: (kind.operations, kind.elements)
                for n, kind in factors.items()
            },
            # To the eigenbasis and back.
            precondition=matrix if solver.is_explicit else 2 * matrix,
            largest_rows=most_rows(factors, workers) if takes_rows else 0,
            row=sum(one.values()) + (inputs * outputs if workers > 1 else 0),
            width=inputs + outputs if workers == 1 else 0,
        )

    def apply(self, rows: float) -> float:
        """Multiplications that precondition a gradient of so many rows."""
        if 0 < rows <= self.largest_rows:
            return rows * self.row + rows**2 * self.width
        return self.precondition


class Loads:
    """Sums over the layers of each worker of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        columns = [layer.gradient_workers[0] for layer in plan.layers]
        self._columns = np.array(columns, np.int64)

    def owned(self, values: Sequence[Mapping[str, float]]) -> Numbers:
        """Sums of numbers of factors over those that each worker owns."""
        sums = np.zeros(self.plan.workers)
        for layer, named in zip(self.plan.layers, values, strict=True):
            for name, value in named.items():
                sums[layer.owners[name]] += value
        return sums

    def preconditioned(self, values: Sequence[float]) -> Numbers:
        """Sums of numbers of layers over those that each preconditions."""
        sums = np.zeros(self.plan.columns)
        np.add.at(sums, self._columns, values)
        return np.resize(sums, self.plan.workers)

    def state(self, costs: Sequence[BlockCost]) -> dict[str, Numbers]:
        """Bytes of factors and decompositions that each worker keeps."""
        kept = [one.decomposition for one in costs]
        return {
            "factors": self.owned([one.factors for one in costs]),
            "decompositions": self.preconditioned(kept),
        }

    def received(
        self, costs: Sequence[BlockCost], gradients: int
    ) -> dict[str, Numbers]:
        """Bytes of each kind of message that each worker receives.

        They come of the bytes of each block, and of all gradients of the model.
        """
        plan = self.plan
        statistics = plan.reduces_factors * sum(s.statistics for s in costs)
        reduced, added = (
            np.full(plan.workers, all_reduce_bytes(size, plan.workers))
            for size in (statistics, gradients)
        )
        parts = self.preconditioned([sum(s.parts.values()) for s in costs])
        here = self.preconditioned([one.gradient for one in costs])
        return {
            "gradients": added,
            "factors": reduced,
            "decompositions": parts - self.owned([s.parts for s in costs]),
            "preconditioned_gradients": sum(s.gradient for s in costs) - here,
        }
