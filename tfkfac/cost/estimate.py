"""Seconds, bytes and memory of K-FAC under each distribution, compared."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfkfac.blocks import Block
from tfkfac.blocks.registry import build_registry
from tfkfac.checks import check_choice, check_count
from tfkfac.cost.batch import Batch, Network
from tfkfac.cost.loads import BlockCost, Loads, Numbers
from tfkfac.cost.machine import Machine
from tfkfac.distributed.collectives import BUCKET_BYTES, gradient_bytes
from tfkfac.distributed.plan import MODES, Plan, plan_layers
from tfkfac.factors.base import Wire
from tfkfac.solvers import SOLVERS

# Up to this, in units of the quickest, less memory decides.
_LEVEL = 1.02
# How often the memory is passed: by the output of a layer in a step; by a
# weight, a factor or a decomposition when it is renewed.
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
    """The cost of a distribution.

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
    """A model and its settings, to be distributed.

    Attributes:
        turns: The turn in which each block is decomposed.
        gradients: Bytes of all gradients of the model.
        batch: A worker's batch; None leaves out its work.
        passes: Further backward passes where factors are updated.
        first_order: Seconds of a step without K-FAC and collectives; None
            estimates them by the batch and the machine.
    """

    blocks: Sequence[Block]
    turns: Sequence[int]
    gradients: int
    wire: Wire = dataclasses.field(default_factory=Wire)
    assignment: str | None = None
    batch: Batch | None = None
    passes: int = 0
    first_order: float | None = None


def compare(
    optimizer: Any,
    machine: Machine,
    workers: int,
    batch: int,
    *,
    solvers: Sequence[str] = ("inverse", "eigen"),
    size: int | None = None,
    passes: int = 0,
    first_order: float | None = None,
) -> list[Estimate]:
    """Estimates what K-FAC costs on a cluster, for every distribution.

    >>> optimizer = tfkfac.KFAC().attach(model)
    >>> machine = tfkfac.cost.Machine.of(14e12, 12.5e9, 5e-6)
    >>> tfkfac.cost.compare(optimizer, machine, workers=64, batch=32)

    Nothing is run. The arguments of the optimizer count, but for its
    distribution and solver.

    Args:
        optimizer: A `KFAC`, attached to a built model.
        machine: The machine.
        workers: Number of workers.
        batch: Examples of a worker's batch.
        solvers: Names of solvers to compare.
        size: The value of unknown sizes of the model's input, as an image's.
        passes: Further backward passes where factors are updated: 1 for the
            Fisher matrix "monte_carlo", 0 for "empirical".
        first_order: Seconds of a worker's step without K-FAC, if they are
            known. Defaults to None: they come of the machine's numbers.

    Returns:
        An estimate of each distribution.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If an argument is not allowed, or the model's inputs are
            not known.
    """
    check_count("workers", workers, 1)
    check_count("batch", batch, 1)
    check_count("passes", passes)
    for solver in solvers:
        check_choice("solvers", solver, tuple(SOLVERS))
    model = optimizer.bound_model()
    placement, method = optimizer.method.placement, optimizer.method
    work = Batch.of(
        Network(model, batch, size),
        placement.blocks,
        batch,
        method.factor_batch_fraction,
        build_registry(model, ()).blocks,
    )
    load = Workload(
        placement.blocks,
        placement.turns,
        gradient_bytes(model.trainable_variables),
        placement.wire,
        placement.distribution.assignment,
        work,
        passes,
        first_order,
    )
    some = list(candidates(workers, solvers, tuple(MODES)))
    return compare_plans(load, some, machine, workers)


def recommend(
    estimates: Sequence[Estimate], factor_interval: int, inverse_interval: int
) -> Estimate:
    """The quickest one; among those within 2 % of it that of least memory.

    Args:
        estimates: The estimates to choose from.
        factor_interval: Steps between updates of the factors.
        inverse_interval: Steps between decompositions of a block.
    """
    intervals = factor_interval, inverse_interval
    least = min(one.amortised(*intervals) for one in estimates)
    level = [
        one for one in estimates if one.amortised(*intervals) <= _LEVEL * least
    ]
    return min(
        level, key=lambda one: (one.state["total"], one.amortised(*intervals))
    )


def candidates(
    workers: int, solvers: Sequence[str], distributions: Sequence[str]
) -> Iterator[Candidate]:
    """All distributions, with each fraction that is not another mode's."""
    for solver, mode in itertools.product(solvers, distributions):
        if MODES[mode].gradient_workers != "fraction":
            yield Candidate(mode, None, solver)
            continue
        # Of one worker and of all it is "mem_opt" and "comm_opt".
        for count in range(2, workers):
            if workers % count == 0:
                yield Candidate(mode, count / workers, solver)


def compare_plans(
    load: Workload, some: Sequence[Candidate], machine: Machine, workers: int
) -> list[Estimate]:
    """Estimates the cost of some distributions of a model over workers."""
    factors = [block.factors for block in load.blocks]
    solvers = {name: SOLVERS[name]() for _, _, name in some}
    costs = {
        name: [
            BlockCost.of(block, solver, load.wire, workers)
            for block in load.blocks
        ]
        for name, solver in solvers.items()
    }
    found = []
    for one in some:
        solver = solvers[one.solver]
        layers = plan_layers(
            factors,
            workers,
            one.distribution,
            one.fraction,
            load.assignment,
            solver.whole_layers,
            load.turns,
        )
        plan = Plan(MODES[one.distribution], workers, layers)
        rate = machine.inverse if solver.is_explicit else machine.eigen
        estimator = Estimator(plan, load, costs[one.solver], machine, rate)
        found.append(estimator.estimate(one))
    return found


class Estimator(Loads):
    """Seconds of each stage of a plan.

    The machine decomposes at a rate of so many n^3 a second.
    """

    def __init__(
        self,
        plan: Plan,
        load: Workload,
        costs: Sequence[BlockCost],
        machine: Machine,
        rate: float,
    ) -> None:
        super().__init__(plan)
        self._load = load
        self._costs = costs
        self._machine = machine
        self._rate = rate
        none = [0] * len(load.blocks)
        self._batch = load.batch or Batch(1, 1.0, 0, 0, none, none, none)

    def estimate(self, candidate: Candidate) -> Estimate:
        """The cost of the plan, which is that of a candidate."""
        received = self.received(self._costs, self._load.gradients)
        state = self.state(self._costs)
        state["total"] = state["factors"] + state["decompositions"]
        turns = [self._turn(turn) for turn in sorted({*self._load.turns})]
        statistics = sum(one.statistics for one in self._costs)
        stages = {
            "first_order": self._first_order(),
            "gradients": self._all_reduce(self._load.gradients),
            "statistics": self._statistics(),
            "reduce_factors": self._all_reduce(
                statistics * self.plan.reduces_factors
            ),
            "decompose": sum(made for made, _ in turns),
            "share_decompositions": sum(sent for _, sent in turns),
            "precondition": self._precondition(),
            "share_gradients": self._share_gradients(received),
        }
        return Estimate(
            candidate,
            stages,
            max((made + sent for made, sent in turns), default=0.0),
            {kind: int(sums.max()) for kind, sums in received.items()},
            {kind: int(sums.max()) for kind, sums in state.items()},
        )

    def _first_order(self) -> float:
        """Forward pass, back to inputs and to weights, and the update."""
        if self._load.first_order is not None:
            return self._load.first_order
        batch, machine = self._batch, self._machine
        moved = _OUTPUT_MOVES * batch.outputs * _FLOAT
        return (
            machine.products(3 * batch.forward)
            + moved / machine.memory
            + self._renewed(self._load.gradients)
            + machine.overhead
        )

    def _statistics(self) -> float:
        """Statistics of the batch, and the averages that they move."""
        batch, machine, plan = self._batch, self._machine, self.plan
        share = batch.share(plan.observers)
        seconds = [
            share * (machine.products(m) + 2 * _FLOAT * read / machine.memory)
            for m, read in zip(batch.statistics, batch.read, strict=True)
        ]
        # To the pre-activations; the rest of a step is forward and to weights.
        draw = self._load.passes * self._first_order() / 3
        taken: Any = sum(seconds)
        if not plan.mode.reduces_factors:
            taken = self.preconditioned(seconds)  # by the layers' owners
        kept = self.owned([one.factors for one in self._costs])
        return draw + (taken + self._renewed(kept)).max()

    def _renewed(self, size: Any) -> Any:
        """Seconds in which so many bytes are renewed in memory."""
        return _RENEWAL_MOVES * size / self._machine.memory

    def _turn(self, turn: int) -> tuple[float, float]:
        """Seconds of the decompositions of one turn, and of sending them."""
        mine = [one == turn for one in self._load.turns]
        element = self._machine.element
        seconds = [
            {
                name: here * (count / self._rate + elements * element)
                for name, (count, elements) in work.decompositions.items()
            }
            for here, work in zip(mine, self._costs, strict=True)
        ]
        renewed = [
            here * one.decomposition
            for here, one in zip(mine, self._costs, strict=True)
        ]
        moved = self._renewed(self.preconditioned(renewed))
        made = (self.owned(seconds) + moved).max()
        return made, self._share_parts(mine)

    def _share_parts(self, mine: Sequence[bool]) -> float:
        plan = self.plan
        parts = [
            one.parts if here else {}
            for here, one in zip(mine, self._costs, strict=True)
        ]
        needed = self.preconditioned([sum(named.values()) for named in parts])
        received = (needed - self.owned(parts)).max()
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

    def _precondition(self) -> float:
        """The products, and the clip of all that comes of them."""
        machine = self._machine
        everywhere = self.plan.columns == 1
        work = [
            one.apply(rows) if everywhere else one.precondition
            for one, rows in zip(self._costs, self._batch.rows, strict=True)
        ]
        clipped = sum(one.gradient for one in self._costs)
        seconds = self.preconditioned([machine.products(w) for w in work])
        return seconds.max() + self._renewed(clipped)

    def _share_gradients(self, received: Mapping[str, Numbers]) -> float:
        plan = self.plan
        size = received["preconditioned_gradients"].max()
        senders = {layer.gradient_workers[0] for layer in plan.layers}
        messages = len(senders) + math.ceil(size / BUCKET_BYTES)
        return self._machine.broadcast(size, plan.columns, messages)

    def _all_reduce(self, size: int) -> float:
        messages = math.ceil(size / BUCKET_BYTES)
        return self._machine.all_reduce(size, self.plan.workers, messages)
