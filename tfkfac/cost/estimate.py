"""Seconds, bytes and memory of K-FAC under one distribution."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfkfac.blocks import Block
from tfkfac.cost.batch import Batch
from tfkfac.cost.loads import Loads, Numbers
from tfkfac.cost.machine import Machine
from tfkfac.cost.sizes import BlockBytes
from tfkfac.cost.work import BlockWork
from tfkfac.distributed.collectives import BUCKET_BYTES
from tfkfac.distributed.plan import Plan
from tfkfac.distributed.wire import Wire
from tfkfac.solvers import Solver

# How often the output of a layer passes the memory in a step, and what is
# renewed when it is: a weight, a factor, a decomposition.
_OUTPUT_MOVES, _RENEWAL_MOVES = 6, 4
_FLOAT = 4  # bytes


class Candidate(NamedTuple):
    """A way to distribute K-FAC.

    Attributes:
        distribution: The mode.
        fraction: Share of the workers that are gradient workers of a layer;
            with "hybrid_opt" only.
        solver: Name of the solver.
    """

    distribution: str
    fraction: float | None
    solver: str

    @property
    def text(self) -> str:
        """The distribution in a table."""
        if self.fraction is None:
            return self.distribution
        return f"{self.distribution} {self.fraction:.4g}"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a distribution costs.

    Attributes:
        candidate: The distribution.
        stages: Seconds of each stage on the worker for which it takes longest.
            Those of the decompositions are of all turns.
        longest_turn: Seconds of the longest turn, with sending its results.
        received: Bytes that a worker receives at most, by kind of message.
        state: Bytes of curvature state that a worker has at most.
    """

    candidate: Candidate
    stages: Mapping[str, float]
    longest_turn: float
    received: Mapping[str, int]
    state: Mapping[str, int]

    def _sum(self, *names: str) -> float:
        return sum(self.stages[name] for name in names)

    @property
    def plain(self) -> float:
        """Seconds of a step that renews nothing."""
        return self._sum(
            "first_order", "gradients", "precondition", "share_gradients"
        )

    @property
    def factor(self) -> float:
        """Seconds of a step that updates the factors."""
        return self.plain + self._sum("statistics", "reduce_factors")

    @property
    def inverse(self) -> float:
        """Seconds of the longest step that decomposes, without factors."""
        return self.plain + self.longest_turn

    def amortised(self, factor_interval: int, inverse_interval: int) -> float:
        """Mean seconds of a step.

        Args:
            factor_interval: Steps between updates of the factors.
            inverse_interval: Steps between decompositions of a block.
        """
        factors = self._sum("statistics", "reduce_factors")
        inverses = self._sum("decompose", "share_decompositions")
        rest = factors / factor_interval + inverses / inverse_interval
        return self.plain + rest


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be distributed.

    Attributes:
        blocks: The blocks.
        turns: The turn in which each block is decomposed.
        gradients: Bytes of all gradients of the model.
        wire: In which form tensors travel.
        assignment: What the owners are balanced by, see `KFAC`.
        batch: A worker's batch; None leaves out all that it takes.
        passes: Further backward passes where factors are updated, for labels
            that are drawn.
        first_order: Seconds of a step without K-FAC and collectives; None is
            what the batch and the machine say.
    """

    blocks: Sequence[Block]
    turns: Sequence[int]
    gradients: int
    wire: Wire = dataclasses.field(default_factory=Wire)
    assignment: str | None = None
    batch: Batch | None = None
    passes: int = 0
    first_order: float | None = None


class Estimator:
    """Estimates what plans cost.

    Args:
        load: What is distributed.
        solver: The solver.
        machine: The machine.
        workers: Number of workers.
    """

    def __init__(
        self, load: Workload, solver: Solver, machine: Machine, workers: int
    ) -> None:
        self.sizes = [BlockBytes.of(b, solver, load.wire) for b in load.blocks]
        self._work = [BlockWork.of(b, solver, workers) for b in load.blocks]
        self._load = load
        self._machine = machine
        self._rate = machine.inverse if solver.is_explicit else machine.eigen
        none = [0] * len(load.blocks)
        self._batch = load.batch or Batch(1, 1.0, 0, 0, none, none, none)

    def estimate(self, candidate: Candidate, plan: Plan) -> Estimate:
        """Estimates one of them."""
        loads = Loads(plan)
        received = loads.received(self.sizes, self._load.gradients)
        state = loads.state(self.sizes)
        turns = [
            self._turn(loads, turn) for turn in sorted({*self._load.turns})
        ]
        total = {
            w: sum(kind[w] for kind in state.values()) for w in loads.workers
        }
        statistics = sum(s.statistics for s in self.sizes)
        stages = {
            "first_order": self._first_order(),
            "gradients": self._all_reduce(self._load.gradients, plan),
            "statistics": self._statistics(loads),
            "reduce_factors": self._all_reduce(
                statistics * plan.reduces_factors, plan
            ),
            "decompose": sum(made for made, _ in turns),
            "share_decompositions": sum(sent for _, sent in turns),
            "precondition": self._precondition(loads),
            "share_gradients": self._share_gradients(loads, received),
        }
        return Estimate(
            candidate,
            stages,
            max((made + sent for made, sent in turns), default=0.0),
            {kind: round(_most(sums)) for kind, sums in received.items()},
            {kind: round(_most(sums)) for kind, sums in state.items()}
            | {"total": round(_most(total))},
        )

    # ------------------------------------------------------------ the stages
    def _first_order(self) -> float:
        """Forward pass, back to inputs and to weights, and the update."""
        if self._load.first_order is not None:
            return self._load.first_order
        batch, machine = self._batch, self._machine
        moved = _OUTPUT_MOVES * batch.outputs * _FLOAT
        return (
            machine.products(3 * batch.forward)
            + (moved + _RENEWAL_MOVES * self._load.gradients) / machine.memory
            + machine.overhead
        )

    def _statistics(self, loads: Loads) -> float:
        """Statistics of the batch, and the averages that they move."""
        batch, machine, plan = self._batch, self._machine, loads.plan
        share = batch.share(plan.observers)
        seconds = [
            share * (machine.products(m) + 2 * _FLOAT * read / machine.memory)
            for m, read in zip(batch.statistics, batch.read, strict=True)
        ]
        # To the pre-activations; the rest of a step is forward and to weights.
        draw = self._load.passes * self._first_order() / 3
        kept = loads.owned([one.factors for one in self.sizes])
        taken = {w: sum(seconds) for w in loads.workers}
        if not plan.mode.reduces_factors:
            taken = loads.preconditioned(seconds)  # by the layers' owners
        return draw + _most(
            {
                w: taken[w] + _RENEWAL_MOVES * kept[w] / machine.memory
                for w in loads.workers
            }
        )

    def _turn(self, loads: Loads, turn: int) -> tuple[float, float]:
        """Seconds of the decompositions of one turn, and of sending them."""
        mine = [one == turn for one in self._load.turns]
        return self._decompose(loads, mine), self._share_parts(loads, mine)

    def _decompose(self, loads: Loads, mine: Sequence[bool]) -> float:
        machine = self._machine
        seconds = [
            {
                name: here * (count / self._rate + elements * machine.element)
                for name, (count, elements) in work.decompositions.items()
            }
            for here, work in zip(mine, self._work, strict=True)
        ]
        made = loads.owned(seconds)
        renewed = loads.preconditioned(
            [
                here * one.decomposition
                for here, one in zip(mine, self.sizes, strict=True)
            ]
        )
        return _most(
            {
                w: made[w] + _RENEWAL_MOVES * renewed[w] / machine.memory
                for w in loads.workers
            }
        )

    def _share_parts(self, loads: Loads, mine: Sequence[bool]) -> float:
        plan = loads.plan
        parts = [
            one.parts if here else {}
            for here, one in zip(mine, self.sizes, strict=True)
        ]
        needed = loads.preconditioned([sum(named.values()) for named in parts])
        own = loads.owned(parts)
        received = _most({w: needed[w] - own[w] for w in loads.workers})
        owners = {
            layer.owners[name]
            for named, layer in zip(parts, plan.layers, strict=True)
            for name in named
        }
        # Messages in one of the columns, which all send at once.
        messages = math.ceil(len(owners) / plan.columns)
        messages += math.ceil(received / BUCKET_BYTES)
        members = plan.workers // plan.columns
        return self._machine.broadcast(received, members, messages)

    def _precondition(self, loads: Loads) -> float:
        """The products, and the clip of all that comes of them."""
        machine, batch = self._machine, self._batch
        everywhere = loads.plan.columns == 1
        work = [
            one.apply(rows) if everywhere else one.precondition
            for one, rows in zip(self._work, batch.rows, strict=True)
        ]
        clipped = sum(one.gradient for one in self.sizes)
        seconds = loads.preconditioned([machine.products(w) for w in work])
        return _most(seconds) + _RENEWAL_MOVES * clipped / machine.memory

    def _share_gradients(
        self, loads: Loads, received: Mapping[str, Numbers]
    ) -> float:
        plan = loads.plan
        size = _most(received["preconditioned_gradients"])
        senders = {layer.gradient_workers[0] for layer in plan.layers}
        messages = len(senders) + math.ceil(size / BUCKET_BYTES)
        return self._machine.broadcast(size, plan.columns, messages)

    def _all_reduce(self, size: int, plan: Plan) -> float:
        messages = math.ceil(size / BUCKET_BYTES)
        return self._machine.all_reduce(size, plan.workers, messages)


def _most(numbers: Numbers) -> float:
    return max(numbers.values(), default=0)
