"""Placement of the blocks on workers, its loads, and the update schedule."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.blocks.registry import Registry
from tfkfac.distributed.collectives import all_reduce_bytes, sum_dtype
from tfkfac.distributed.plan import MODES, Plan, assign, plan_layers
from tfkfac.distributed.topology import Topology
from tfkfac.factors.base import Wire
from tfkfac.kfac.exchange import Exchange
from tfkfac.kfac.settings import Distribution
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.solvers import Solver
from tfkfac.solvers.base import most_rows

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


class Placement:
    """The blocks of a model on the workers of a job.

    Some numbers travel `beside` each preconditioned gradient.

    Attributes:
        turns: The turn in which each block is decomposed.
        sizes: Bytes of each block.
    """

    def __init__(
        self,
        registry: Registry,
        topology: Topology,
        solver: Solver,
        distribution: Distribution,
        beside: int = 0,
    ) -> None:
        self.registry = registry
        self.topology = topology
        self.solver = solver
        self.distribution = distribution
        factors = [block.factors for block in registry.blocks]
        self.turns = take_turns(
            [sum(f.operations for f in kinds.values()) for kinds in factors]
        )
        self.plan = Plan(
            MODES[distribution.mode],
            topology.replicas,
            plan_layers(
                factors,
                topology.replicas,
                distribution.mode,
                distribution.gradient_worker_fraction,
                distribution.assignment,
                solver.whole_layers,
                self.turns,
            ),
        )
        dtype = distribution.wire_dtype
        self.wire = Wire(
            distribution.symmetric,
            dtype and sum_dtype(dtype, topology.hint),
            distribution.storage_dtype,
        )
        self.exchange = Exchange(
            self.plan, registry.blocks, solver, self.wire, beside
        )
        self.sizes = [
            BlockCost.of(block, solver, self.wire, topology.replicas, beside)
            for block in registry.blocks
        ]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, in the order of the layers."""
        return self.registry.blocks

    @property
    def takes_rows(self) -> bool:
        """True if gradients may be preconditioned by their rows.

        Every worker has to do it with its own ones.
        """
        everywhere = all(
            len(layer.gradient_workers) == self.topology.replicas
            for layer in self.plan.layers
        )
        return self.solver.takes_rows and everywhere

    def kept_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the curvature of a block that a worker keeps."""
        sizes, plan = self.sizes[layer], self.plan
        factors = sum(sizes.factors[name] for name in plan.owns(rank, layer))
        return factors + sizes.decomposition * plan.preconditions(rank, layer)

    def state_bytes(self, rank: int) -> dict[str, int]:
        """Bytes of factors and decompositions of a worker."""
        state = Loads(self.plan).state(self.sizes)
        return {kind: int(sums[rank]) for kind, sums in state.items()}

    def accumulated_bytes(self, rank: int) -> int:
        """Bytes of the statistics that a worker adds up over micro-batches."""
        return sum(
            (kind.elements + 1) * block.dtype.size
            for i, block in enumerate(self.blocks)
            if self.plan.observes(rank, i)
            for kind in block.factors.values()
        )

    def momentum_bytes(self, rank: int) -> int:
        """Bytes of the momenta of a worker, beside its decompositions.

        They are kept twice, as they are and preconditioned.
        """
        return sum(
            2 * math.prod(block.gradient_shape) * block.dtype.size
            for i, block in enumerate(self.blocks)
            if self.plan.preconditions(rank, i)
        )

    def communication_bytes(
        self, rank: int, gradient_bytes: int
    ) -> dict[str, dict[str, int]]:
        """Bytes that a worker receives in each kind of step, by message."""
        received = Loads(self.plan).received(self.sizes, gradient_bytes)
        every = {kind: int(sums[rank]) for kind, sums in received.items()}
        return {
            "plain": every | {"factors": 0, "decompositions": 0},
            "factor": every | {"decompositions": 0},
            "inverse": every | {"factors": 0},
        }


# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions, short while the curvature changes
# fast.
_BOUNDARIES = (20, 100)
FACTORS = (1, 5, 20)
INVERSES = (5, 20, 100)

# Turns of decompositions. Each is a branch of the graph, so there are few.
_MOST_TURNS = 4
# Operations that are worth a turn of their own: about 10 ms of one core.
_WORTH_A_TURN = 2 * 10**8
# The longest turn may be so many times as long as it has to be.
_SLACK = 1.5


def steps_between(
    interval: Hyperparameter, measured: tuple[int, int, int], clock: tf.Tensor
) -> tf.Tensor:
    """Steps between two updates or two decompositions, a scalar int64.

    If the user has set no interval it is of the measured schedule.
    """
    if interval.get() is not None:
        return interval.at(clock)
    first, second = _BOUNDARIES
    short, middle, long = (tf.constant(i, tf.int64) for i in measured)
    late = tf.where(clock < second, middle, long)
    return tf.where(clock < first, short, late)


def take_turns(operations: Sequence[int]) -> tuple[int, ...]:
    """Divides the blocks into turns, so that no step has all decompositions.

    There are as few turns as keep each about as short as the largest block
    allows, a single one for a small model. They are of the blocks alone, of
    the operations that each takes: the steps of a job must not depend on its
    number of workers.
    """
    limit = _SLACK * max([_WORTH_A_TURN, *operations])
    count, turns = 1, (0,) * len(operations)
    while count < _MOST_TURNS and _longest(operations, turns) > limit:
        count += 1
        turns = assign(operations, count, "compute")
    return turns


def _longest(operations: Sequence[int], turns: Sequence[int]) -> int:
    """Operations of the longest turn."""
    lengths: Counter[int] = Counter()
    for work, turn in zip(operations, turns, strict=True):
        lengths[turn] += work
    return max(lengths.values(), default=0)


def turns_due(
    turns: int,
    interval: tf.Tensor,
    factor_interval: tf.Tensor,
    clock: tf.Tensor,
) -> list[tf.Tensor]:
    """A bool for each turn of decompositions, true if it is due.

    They are spread evenly over the interval, so that each comes once in it. A
    turn that would come with a factor update comes one step later, when the
    factors are fresh and the step is free; a single turn is never delayed.
    """

    def occupied(delay: tf.Tensor) -> tf.Tensor:
        coincide = tf.equal(delay % factor_interval, 0) & (factor_interval > 1)
        return tf.cast(coincide, tf.int64)

    delays = [turn * interval // turns for turn in range(turns)]
    if turns > 1:
        delays = [delay + occupied(delay) for delay in delays]
    return [tf.equal((clock - delay) % interval, 0) for delay in delays]
