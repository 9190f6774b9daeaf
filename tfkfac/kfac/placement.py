"""Placement of the blocks on workers, and the schedule of their renewal."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.blocks.registry import Registry, build_registry
from tfkfac.capture.walk import SkipRule
from tfkfac.cost.auto import choose, measure_machine
from tfkfac.cost.estimate import Workload
from tfkfac.cost.loads import BlockCost, Loads
from tfkfac.cost.machine import Machine
from tfkfac.distributed.collectives import sum_dtype
from tfkfac.distributed.plan import MODES, Plan, assign, plan_layers
from tfkfac.distributed.topology import Topology
from tfkfac.factors import Limit
from tfkfac.factors.base import Wire
from tfkfac.kfac.exchange import Exchange
from tfkfac.kfac.settings import AUTO, Distribution
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.solvers import SOLVERS, Solver
from tfkfac.training.job import Job


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


class Placer:
    """Places blocks on workers, once in the mode that "auto" has chosen.

    It leaves out some classes of blocks.

    Attributes:
        lines: Lines of a summary about the choice; none without a choice.
    """

    def __init__(
        self,
        distribution: Distribution,
        solver: str,
        skip_layers: Sequence[SkipRule],
        limit: Limit,
        left_out: tuple[type[Block], ...] = (),
        beside: int = 0,
    ) -> None:
        self._distribution = distribution
        self._solver = solver
        self._skip_layers = skip_layers
        self._limit = limit
        self._left_out = left_out
        self._beside = beside
        self._machine: Machine | None = None
        self._chosen: Distribution | None = None
        self.lines: list[str] = []

    def measure(self, job: Job) -> None:
        """Measures the machine for "auto"; all workers have to call it."""
        chooses = self._distribution.mode == AUTO
        if chooses and job.topology.replicas > 1 and self._machine is None:
            group = job.among_processes("machine")
            self._machine = measure_machine(job.topology, group)
            self._chosen = None

    def place(self, job: Job, *intervals: Hyperparameter) -> Placement:
        """Places the blocks; intervals are of factors and decompositions."""
        registry = build_registry(
            job.model, self._skip_layers, self._limit, self._left_out
        )
        solver = SOLVERS[self._solver]()
        chosen = self._chosen or self._distribution
        if chosen.mode == AUTO:
            plain = dataclasses.replace(chosen, mode="comm_opt")
            placement = Placement(registry, job.topology, solver, plain)
            load = Workload(
                placement.blocks,
                placement.turns,
                gradients=0,
                wire=placement.wire,
                assignment=plain.assignment,
                first_order=0.0,
            )
            best, self.lines = choose(
                load,
                self._solver,
                job.topology,
                self._machine,
                _steps(*intervals),
            )
            chosen = self._chosen = dataclasses.replace(
                plain,
                mode=best.distribution,
                gradient_worker_fraction=best.fraction,
            )
        return Placement(registry, job.topology, solver, chosen, self._beside)


def _steps(factor: Hyperparameter, inverse: Hyperparameter) -> tuple[int, int]:
    """The intervals; where they change, those the measured schedule ends at."""
    given, last = (factor.get(), inverse.get()), (FACTORS[-1], INVERSES[-1])
    late = [
        value if isinstance(value, int) else end
        for value, end in zip(given, last, strict=True)
    ]
    return late[0], late[1]
