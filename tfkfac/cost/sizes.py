"""Bytes of a block: what is kept of it, and what travels.

Neither depends on who has it: a plan says which worker keeps or receives it.
"""

import dataclasses
import math
from collections.abc import Mapping

from tfkfac.blocks import Block
from tfkfac.distributed.wire import Wire
from tfkfac.solvers import Solver


@dataclasses.dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block.

    Attributes:
        factors: Those of each average that an owner keeps, by name.
        decomposition: What each gradient worker keeps.
        statistics: What all workers add up of a batch.
        parts: What the owner of each factor sends when it is decomposed.
        gradient: The preconditioned gradient.
    """

    factors: Mapping[str, int]
    decomposition: int
    statistics: int
    parts: Mapping[str, int]
    gradient: int

    @classmethod
    def of(cls, block: Block, solver: Solver, wire: Wire) -> "BlockBytes":
        """Counts those of a block."""
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
