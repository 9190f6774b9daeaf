"""What falls to each worker of a plan, also where there are thousands.

A worker is told by the column of gradient workers that it is in and by the
factors that it owns. Most of thousands own none, so that a few of them stand
for all.
"""

from collections.abc import Mapping, Sequence

from tfkfac.cost.sizes import BlockBytes
from tfkfac.distributed.plan import Plan
from tfkfac.distributed.wire import all_reduce_bytes

# By worker, those that stand for all.
Numbers = dict[int, float]


class Loads:
    """Sums over the layers that a worker has to do with.

    Args:
        plan: The plan.

    Attributes:
        workers: Workers that stand for all: those that own a factor, and one
            without any of each column that has one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        owners = {w for layer in plan.layers for w in layer.owners.values()}
        self._columns = [layer.gradient_workers[0] for layer in plan.layers]
        # Of the columns without layers one is enough.
        used = dict.fromkeys(self._columns)
        unused = (c for c in range(plan.columns) if c not in used)
        some = [*used, *list(unused)[:1]]
        idle = (
            next((w for w in self._members(c) if w not in owners), None)
            for c in some
        )
        self.workers = sorted(owners | {w for w in idle if w is not None})

    def _members(self, column: int) -> range:
        return range(column, self.plan.workers, self.plan.columns)

    def owned(self, values: Sequence[Mapping[str, float]]) -> Numbers:
        """Sums of numbers of factors, by the workers that stand for all."""
        sums: Numbers = dict.fromkeys(self.workers, 0)
        for layer, named in zip(self.plan.layers, values, strict=True):
            for name, value in named.items():
                sums[layer.owners[name]] += value
        return sums

    def preconditioned(self, values: Sequence[float]) -> Numbers:
        """Sums of numbers of layers, by those workers."""
        sums: Numbers = {}
        for column, value in zip(self._columns, values, strict=True):
            sums[column] = sums.get(column, 0) + value
        return {w: sums.get(w % self.plan.columns, 0) for w in self.workers}

    def state(self, sizes: Sequence[BlockBytes]) -> dict[str, Numbers]:
        """Bytes of factors and decompositions that those workers keep."""
        return {
            "factors": self.owned([one.factors for one in sizes]),
            "decompositions": self.preconditioned(
                [one.decomposition for one in sizes]
            ),
        }

    def received(
        self, sizes: Sequence[BlockBytes], gradients: int
    ) -> dict[str, Numbers]:
        """Bytes that those workers receive of each kind of message.

        Args:
            sizes: Bytes of each block.
            gradients: Bytes of all gradients of the model.
        """
        statistics = sum(one.statistics for one in sizes)
        if not self.plan.reduces_factors:
            statistics = 0
        reduced, added = (
            all_reduce_bytes(size, self.plan.workers)
            for size in (statistics, gradients)
        )
        parts = self.preconditioned([sum(s.parts.values()) for s in sizes])
        made = self.owned([one.parts for one in sizes])
        here = self.preconditioned([one.gradient for one in sizes])
        everywhere = sum(one.gradient for one in sizes)
        return {
            "gradients": dict.fromkeys(self.workers, added),
            "factors": dict.fromkeys(self.workers, reduced),
            "decompositions": {w: parts[w] - made[w] for w in self.workers},
            "preconditioned_gradients": {
                w: everywhere - here[w] for w in self.workers
            },
        }
