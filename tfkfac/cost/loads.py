"""Per-worker load of a plan."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tfkfac.blocks import Block
from tfkfac.distributed.collectives import all_reduce_bytes
from tfkfac.distributed.plan import Plan
from tfkfac.factors.base import Wire
from tfkfac.solvers import Solver, most_rows

Numbers = np.ndarray  # one of each worker


@dataclasses.dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block, whichever workers keep or receive them.

    Attributes:
        factors: Those of each average that an owner keeps, by name.
        decomposition: Those that each gradient worker keeps.
        statistics: Those that all workers add up of a batch.
        parts: Those that the owner of each factor sends when it is decomposed.
        gradient: Those of the preconditioned gradient.
    """

    factors: Mapping[str, int]
    decomposition: int
    statistics: int
    parts: Mapping[str, int]
    gradient: int

    @classmethod
    def of(cls, block: Block, solver: Solver, wire: Wire) -> "BlockBytes":
        """Counts the bytes of a block."""
        kinds, own = block.factors, block.dtype.size
        dtype = wire.inverse_dtype or block.dtype
        kept = solver.kept(kinds).values()
        statistics = 0
        for kind in kinds.values():
            total = math.prod(wire.shape(kind.storage))
            statistics += total * (wire.factor_dtype or block.dtype).size
            # And the number of rows, of the block's dtype, and the units of
            # half precision.
            units = math.prod(kind.storage.scale_shape)
            statistics += own * (1 + units * (wire.factor_dtype is not None))
        parts = {}
        for name in kinds:
            sent = solver.parts(kinds, name).values()
            elements = sum(math.prod(wire.shape(part)) for part in sent)
            parts[name] = elements * dtype.size
        return cls(
            {name: kind.elements * own for name, kind in kinds.items()},
            sum(part.elements for part in kept) * dtype.size,
            statistics,
            parts,
            math.prod(block.gradient_shape) * own,
        )


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """Multiplications of one block.

    Attributes:
        decompositions: About n^3 for each factor, and its elements, by name.
        precondition: Those of the gradient with the decomposition.
        largest_rows: Up to how many rows they are preconditioned in its place;
            0 if never.
        row: Those of one such row, beside the products with other rows.
        width: Those of two rows that meet in `<P, W>`.
    """

    decompositions: Mapping[str, tuple[int, int]]
    precondition: int
    largest_rows: int
    row: int
    width: int

    @classmethod
    def of(cls, block: Block, solver: Solver, workers: int) -> "BlockWork":
        """Counts them for a block whose gradients `workers` add up."""
        factors = block.factors
        *stack, inputs, outputs = block.gradient_shape
        times = {"A": outputs, "G": inputs}
        one = {n: f.multiplications for n, f in factors.items()}
        matrix = sum(one[name] * times[name] for name in factors)
        rows = 0
        if solver.takes_rows and not stack and "A" in factors:
            rows = most_rows(factors, workers)
        return cls(
            {n: (f.operations, f.elements) for n, f in factors.items()},
            # To the eigenbasis and back.
            matrix if solver.is_explicit else 2 * matrix,
            rows,
            sum(one.values()) + (inputs * outputs if workers > 1 else 0),
            inputs + outputs if workers == 1 else 0,
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

    def state(self, sizes: Sequence[BlockBytes]) -> dict[str, Numbers]:
        """Bytes of factors and decompositions that each worker keeps."""
        kept = [one.decomposition for one in sizes]
        return {
            "factors": self.owned([one.factors for one in sizes]),
            "decompositions": self.preconditioned(kept),
        }

    def received(
        self, sizes: Sequence[BlockBytes], gradients: int
    ) -> dict[str, Numbers]:
        """Bytes of each kind of message that each worker receives.

        They come of the bytes of each block, and of all gradients of the model.
        """
        plan = self.plan
        statistics = plan.reduces_factors * sum(s.statistics for s in sizes)
        reduced, added = (
            np.full(plan.workers, all_reduce_bytes(size, plan.workers))
            for size in (statistics, gradients)
        )
        parts = self.preconditioned([sum(s.parts.values()) for s in sizes])
        here = self.preconditioned([one.gradient for one in sizes])
        return {
            "gradients": added,
            "factors": reduced,
            "decompositions": parts - self.owned([s.parts for s in sizes]),
            "preconditioned_gradients": sum(s.gradient for s in sizes) - here,
        }
