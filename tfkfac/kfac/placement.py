"""Placement of the blocks on workers, and the schedule of their renewal."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.blocks.registry import Registry, build_registry
from tfkfac.capture.walk import SkipRule
from tfkfac.cost import Estimate, Machine, recommend
from tfkfac.cost.choice import candidates, compare_plans
from tfkfac.cost.estimate import Workload
from tfkfac.cost.measure import agree, measure_network, measure_worker
from tfkfac.distributed.collectives import sum_dtype
from tfkfac.distributed.plan import MODES, Plan, assign, plan_layers
from tfkfac.distributed.topology import Topology
from tfkfac.distributed.wire import Wire, all_reduce_bytes
from tfkfac.factors import Limit
from tfkfac.kfac.exchange import Exchange, Kinds, step_bytes
from tfkfac.kfac.settings import AUTO, Distribution
from tfkfac.shell.arguments import Hyperparameter, Value
from tfkfac.solvers import SOLVERS, Solver
from tfkfac.training.job import Job


class Placement:
    """The blocks of a model on the workers of a job.

    Args:
        registry: Blocks and leftovers of the model.
        topology: The workers.
        solver: The solver.
        distribution: How the work is distributed.

    Attributes:
        turns: The turn in which each block is decomposed.
    """

    def __init__(
        self,
        registry: Registry,
        topology: Topology,
        solver: Solver,
        distribution: Distribution,
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
        wire = distribution.wire_dtype
        self.exchange = Exchange(
            self.plan,
            registry.blocks,
            solver,
            Wire(
                distribution.symmetric,
                wire and sum_dtype(wire, topology.hint),
                distribution.storage_dtype,
            ),
        )

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

    def factor_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the factors of a block that a worker keeps."""
        sizes = self.exchange.sizes[layer].factors
        return sum(sizes[name] for name in self.plan.owns(rank, layer))

    def decomposition_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the decomposition of a block that a worker keeps."""
        if not self.plan.preconditions(rank, layer):
            return 0
        return self.exchange.sizes[layer].decomposition

    def statistic_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the sums of a block's statistics over micro-batches."""
        if not self.plan.observes(rank, layer):
            return 0
        block = self.blocks[layer]
        kinds = block.factors.values()
        return sum(kind.elements + 1 for kind in kinds) * block.dtype.size

    def state_bytes(
        self,
        rank: int,
        accumulated: int | None = None,
        previous: int | None = None,
    ) -> dict[str, int]:
        """Bytes of the curvature state of a worker.

        Args:
            rank: The worker.
            accumulated: Bytes of the gradients that it adds up over
                micro-batches; None if it does not.
            previous: Bytes of the update before; None if it is not kept.
        """
        layers = range(len(self.blocks))
        sizes = {
            "factors": sum(self.factor_bytes(rank, i) for i in layers),
            "decompositions": sum(
                self.decomposition_bytes(rank, i) for i in layers
            ),
        }
        if accumulated is not None:
            statistics = sum(self.statistic_bytes(rank, i) for i in layers)
            sizes["accumulation"] = accumulated + statistics
        if previous is not None:
            sizes["previous_update"] = previous
        return {**sizes, "total": sum(sizes.values())}

    def communication_bytes(self, rank: int, gradient_bytes: int) -> Kinds:
        """Bytes that a worker receives in each kind of step."""
        workers = self.topology.replicas
        return step_bytes(
            all_reduce_bytes(gradient_bytes, workers),
            self.exchange.factor_traffic(),
            self.exchange.decomposition_traffic(rank),
            self.exchange.gradient_traffic(rank),
        )


# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions.
_BOUNDARIES = (20, 100)
_FACTORS = (1, 5, 20)
_INVERSES = (5, 20, 100)
# Where it ends up.
LATE = (_FACTORS[-1], _INVERSES[-1])

# Turns of decompositions. Each is a branch of the graph, so there are few.
_MOST_TURNS = 4
# Operations that are worth a turn of their own: about 10 ms of one core.
_WORTH_A_TURN = 2 * 10**8
# The longest turn may be so many times as long as it has to be.
_SLACK = 1.5


def check_interval(value: Value) -> Value:
    """Returns `factor_update_interval` unless it is the former "adaptive".

    Raises:
        ValueError: If it is.
    """
    if isinstance(value, str) and value == "adaptive":
        raise ValueError(
            "Argument `factor_update_interval` must be an integer of at least "
            "1, a `LearningRateSchedule` or a callable of the iteration or "
            "None. The intervals of THOR, which followed the traces of the "
            "factors, are gone: on two of three problems they gained nothing, "
            "for 2 to 34 % more time. "
            f"Received: factor_update_interval={value!r}"
        )
    return value


def factors_due(interval: Hyperparameter, clock: tf.Tensor) -> tf.Tensor:
    """True if an interval between updates of the factors ends here.

    Args:
        interval: The user's interval; None is the measured schedule.
        clock: Number of updates of the weights so far.
    """
    return tf.equal(clock % factor_steps(interval, clock), 0)


def factor_steps(interval: Hyperparameter, clock: tf.Tensor) -> tf.Tensor:
    """Steps between updates of the factors, a scalar int64.

    Args:
        interval: The user's interval; None is the measured schedule.
        clock: Number of updates of the weights so far.
    """
    if interval.get() is None:
        return dense_start(clock, _BOUNDARIES, _FACTORS)
    return interval.at(clock)


def inverse_steps(interval: Hyperparameter, clock: tf.Tensor) -> tf.Tensor:
    """Steps between decompositions of a block, see `factor_steps`."""
    if interval.get() is None:
        return dense_start(clock, _BOUNDARIES, _INVERSES)
    return interval.at(clock)


def decompositions_due(
    turns: int,
    interval: Hyperparameter,
    factor_interval: Hyperparameter,
    clock: tf.Tensor,
) -> list[tf.Tensor]:
    """A bool for each turn of decompositions, see `turns_due`.

    Args:
        turns: Number of turns.
        interval: The user's interval between decompositions.
        factor_interval: That between updates of the factors.
        clock: Number of updates of the weights so far.
    """
    factor = factor_steps(factor_interval, clock)
    return turns_due(turns, inverse_steps(interval, clock), factor, clock)


def take_turns(operations: Sequence[int]) -> tuple[int, ...]:
    """Divides the blocks into turns, so that no step has all decompositions.

    There are as few turns as keep each about as short as the largest block
    allows, a single one for a small model. They are of the blocks alone: the
    steps of a job must not depend on its number of workers.

    Args:
        operations: About how many the decompositions of each block take.

    Returns:
        The turn of each block, numbered from 0.
    """
    limit = _SLACK * max([_WORTH_A_TURN, *operations])
    count, turns = 1, (0,) * len(operations)
    while count < _MOST_TURNS and _longest(operations, turns) > limit:
        count += 1
        turns = assign(operations, count, "compute")
    return turns


def _longest(operations: Sequence[int], turns: Sequence[int]) -> int:
    """Operations of the longest turn."""
    lengths = dict.fromkeys(turns, 0)
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

    Args:
        turns: Number of turns.
        interval: Steps between decompositions of a block, int64.
        factor_interval: Steps between updates of the factors, int64.
        clock: Number of updates of the weights so far.

    Returns:
        A scalar bool for each turn.
    """

    def occupied(delay: tf.Tensor) -> tf.Tensor:
        coincide = tf.equal(delay % factor_interval, 0) & (factor_interval > 1)
        return tf.cast(coincide, tf.int64)

    delays = [turn * interval // turns for turn in range(turns)]
    if turns > 1:
        delays = [delay + occupied(delay) for delay in delays]
    return [tf.equal((clock - delay) % interval, 0) for delay in delays]


def dense_start(
    clock: tf.Tensor,
    boundaries: tuple[int, int],
    intervals: tuple[int, int, int],
) -> tf.Tensor:
    """An interval that is short at first, when the curvature changes fast.

    Args:
        clock: Number of updates of the weights so far.
        boundaries: Where the second and the third interval begin.
        intervals: The three intervals.

    Returns:
        The interval, a scalar int64.
    """
    first, second = boundaries
    short, middle, long = (tf.constant(i, tf.int64) for i in intervals)
    late = tf.where(clock < second, middle, long)
    return tf.where(clock < first, short, late)


# What is assumed where nothing has been measured: a core, a GPU; a network of
# 1 and of 100 Gbit/s.
_ASSUMED = {
    "auto": Machine.of(1e11, 1.25e8, 1e-4, tree_broadcast=True),
    "nccl": Machine.of(1e13, 1.25e10, 1e-5),
}


class Placer:
    """Places blocks on workers, and keeps what it has chosen.

    Args:
        distribution: How the work is distributed, perhaps by "auto".
        solver: Name of the solver.
        skip_layers: Layers to leave to the inner optimizer.
        limit: Which factors are kept whole.

    Attributes:
        lines: Lines of a summary on the choice, if there is one.
    """

    def __init__(
        self,
        distribution: Distribution,
        solver: str,
        skip_layers: Sequence[SkipRule],
        limit: Limit,
    ) -> None:
        self._distribution = distribution
        self._solver = solver
        self._skip_layers = skip_layers
        self._limit = limit
        self._machine: Machine | None = None
        self._chosen: Distribution | None = None
        self.lines: list[str] = []

    def measure(self, job: Job) -> None:
        """Measures the machine, if it matters; all workers have to call it.

        What has been measured, and chosen, stays.
        """
        topology = job.topology
        chooses = self._distribution.mode == AUTO and topology.replicas > 1
        if not chooses or self._machine is not None:
            return
        numbers: dict[str, Any] = measure_worker()
        if len(topology.local) > 1:  # the replicas share a memory
            numbers["bandwidth"] = numbers["memory"]
        if topology.processes > 1:
            group = job.among_processes("machine")
            if _shows_network(topology):
                numbers |= measure_network(group)
            numbers = agree(numbers, group)
        assumed = _ASSUMED[topology.hint]
        self._machine = dataclasses.replace(assumed, **numbers)
        self._chosen = None

    def place(self, job: Job, *intervals: Hyperparameter) -> Placement:
        """Places the blocks of a model.

        Args:
            job: The job.
            *intervals: Those of factors and of decompositions.
        """
        registry = build_registry(job.model, self._skip_layers, self._limit)
        solver = SOLVERS[self._solver]()
        if self._distribution.mode != AUTO:
            return Placement(registry, job.topology, solver, self._distribution)
        plain = dataclasses.replace(self._distribution, mode="comm_opt")
        placement = Placement(registry, job.topology, solver, plain)
        if self._chosen is None:
            self._choose(placement, job, _steps(*intervals))
        assert self._chosen is not None
        if self._chosen == plain:
            return placement
        return Placement(registry, job.topology, solver, self._chosen)

    def _choose(
        self,
        placement: Placement,
        job: Job,
        steps: tuple[int, int],
    ) -> None:
        topology, plain = job.topology, placement.distribution
        self._chosen = plain
        if topology.replicas == 1:
            self.lines = ["Distribution: comm_opt, as there is one worker."]
            return
        machine = self._machine or _ASSUMED[topology.hint]
        same = [name for name, mode in MODES.items() if mode.reduces_factors]
        load = Workload(
            placement.blocks,
            placement.turns,
            gradients=0,
            wire=placement.exchange.wire,
            assignment=plain.assignment,
            first_order=0.0,
        )
        some = list(candidates(topology.replicas, [self._solver], same))
        found = compare_plans(load, some, machine, topology.replicas)
        best = recommend(found, *steps)
        self._chosen = dataclasses.replace(
            plain,
            mode=best.candidate.distribution,
            gradient_worker_fraction=best.candidate.fraction,
        )
        self.lines = [
            f"Distribution: {best.candidate.text}, chosen by what K-FAC adds "
            f"to a step at intervals {steps[0]} and {steps[1]}:",
            *(_line(one, steps) for one in found),
            self._numbers(machine, topology),
        ]

    def _numbers(self, machine: Machine, topology: Topology) -> str:
        """Numbers that the choice is based on."""
        work = "assumed" if self._machine is None else "measured"
        sent = work if _shows_network(topology) else "assumed"
        return (
            f"with {machine.flops / 1e9:.3g} GFLOP/s, {work}, and "
            f"{machine.bandwidth / 1e9:.3g} GB/s and "
            f"{1e6 * machine.latency:.3g} us between workers, {sent}."
        )


def _shows_network(topology: Topology) -> bool:
    """True if messages of processes go where those of the step do."""
    return topology.processes > 1 and topology.hint != "nccl"


def _steps(factor: Hyperparameter, inverse: Hyperparameter) -> tuple[int, int]:
    """The intervals; where they change, those of the measured schedule."""
    given = (factor.get(), inverse.get())
    late = [
        value if isinstance(value, int) else schedule
        for value, schedule in zip(given, LATE, strict=True)
    ]
    return late[0], late[1]


def _line(one: Estimate, steps: tuple[int, int]) -> str:
    milliseconds = 1e3 * one.amortised(*steps)
    megabytes = one.state["total"] / 2**20
    return (
        f"  {one.candidate.text}: {milliseconds:.3g} ms, "
        f"{megabytes:.3g} MB of state"
    )
