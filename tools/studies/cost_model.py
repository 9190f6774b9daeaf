"""Cost model of K-FAC: seconds, bytes and memory of each distribution.

Sizes of factors, plans and messages are computed by the library, seconds from
these and the numbers of a `Machine`.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import choose_subsample
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import overridden
from tfkfac.distributed.collectives import BUCKET_BYTES, gradient_bytes
from tfkfac.distributed.plan import MODES, Plan, plan_layers
from tfkfac.factors import Diagonal
from tfkfac.factors.base import Wire
from tfkfac.kfac.placement import BlockCost, Loads, Numbers, assign_groups
from tfkfac.solvers import Solver
from tfkfac.solvers.base import most_rows
from tfkfac.solvers.registry import make_solver

# Operations of matrix products in the time of (Cholesky inverse) / n^3, of
# (eigen-decomposition) / n^3, and of moving a byte in memory. Rough values,
# between CPUs and GPUs.
_INVERSE, _EIGEN, _MEMORY = 5.0, 150.0, 20.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds of equal workers and of their network.

    Attributes:
        flops: Floating point operations a second of matrix products.
        bandwidth: Bytes a second that a worker receives.
        latency: Seconds of a small message.
        overhead: Seconds of a step that the model does not explain.
    """

    flops: float
    bandwidth: float
    latency: float
    overhead: float = 0.0

    @property
    def inverse(self) -> float:
        """Speed of Cholesky inverses, in n^3 per second for size n."""
        return self.flops / _INVERSE

    @property
    def eigen(self) -> float:
        """Speed of eigen-decompositions, in n^3 per second for size n."""
        return self.flops / _EIGEN

    @property
    def memory(self) -> float:
        """Bytes moved in memory per second."""
        return self.flops / _MEMORY

    def products(self, multiplications: float) -> float:
        """Return the seconds of multiplications, each with an addition."""
        return 2 * multiplications / self.flops

    def all_reduce(self, size: float, workers: int, messages: int = 1) -> float:
        """Return the seconds of an all-reduce of `size` bytes.

        A worker receives `2 (P - 1) / P` of the data. A message makes
        `2 (P - 1)` hops in a ring and `2 log2 P` in a tree: take the minimum.
        """
        if workers == 1 or not size:
            return 0.0
        ring = 2 * (workers - 1)
        tree = 2 * math.ceil(math.log2(workers))
        received = 2 * size * (workers - 1) / workers
        hops = messages * min(ring, tree)
        return received / self.bandwidth + hops * self.latency

    def broadcast(self, size: float, members: int, messages: int = 1) -> float:
        """Return the seconds in which a worker receives `size` bytes.

        A message makes `P - 1` hops around a ring of the members, as with NCCL.
        """
        if members == 1 or not size:
            return 0.0
        hops = messages * (members - 1)
        return size / self.bandwidth + hops * self.latency


Shape = tuple[int, ...]


class CallShapes(NamedTuple):
    """Shapes of the first input and the first output of a call."""

    inputs: Shape
    outputs: Shape


class Network:
    """Shapes of all layer calls of a model for a batch, found by tracing.

    The model is functional or sequential, with known sizes of its inputs.

    Attributes:
        elements: Number of outputs of all layers.
    """

    def __init__(self, model: keras.Model, batch: int) -> None:
        self._calls: dict[int, list[CallShapes]] = {}
        # Pass a single input as a tensor, as a sequential model expects.
        is_single = len(model.inputs) == 1
        specs = keras.tree.map_structure(
            lambda t: tf.TensorSpec([batch, *t.shape[1:]], t.dtype),
            model.inputs[0] if is_single else model.input,
        )
        layers = [layer for layer in all_layers(model) if layer is not model]
        with contextlib.ExitStack() as stack:
            for layer in layers:
                record = self._recorder(layer)
                stack.enter_context(overridden(layer, "call", record))
            run = tf.function(lambda x: model(x, training=True))
            run.get_concrete_function(specs)
        self.elements = sum(
            math.prod(call.outputs)
            for layer in layers
            if not children(layer)
            for call in self._calls[id(layer)]
        )

    def _recorder(self, layer: keras.layers.Layer) -> Callable[..., Any]:
        calls = self._calls.setdefault(id(layer), [])

        def call(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outputs = below(*args, **kwargs)
            first, *_ = keras.tree.flatten((args, kwargs))
            last, *_ = keras.tree.flatten(outputs)
            if tf.is_tensor(first) and tf.is_tensor(last):
                calls.append(CallShapes(tuple(first.shape), tuple(last.shape)))
            return outputs

        return call

    def calls(self, block: Block) -> Sequence[CallShapes]:
        """Return the calls of a block's layer."""
        return self._calls[id(block.layer)]

    def rows(self, block: Block) -> int:
        """Return the rows of a block's statistics, summed over all calls."""
        g = block.factors["G"]
        # Both blocks of a separable convolution have its outputs' rows.
        width = getattr(block.layer, "filters", None)
        width = width or math.prod(g.stack_shape) * g.size
        return sum(math.prod(c.outputs) // width for c in self.calls(block))

    def multiplications(self, blocks: Sequence[Block]) -> int:
        """Return the multiplications of a forward pass through blocks.

        Embeddings and normalisation layers count as 0.
        """
        return sum(
            self.rows(block) * math.prod(block.gradient_shape)
            for block in blocks
            if not isinstance(block.factors.get("A"), Diagonal | None)
        )


@dataclasses.dataclass(frozen=True)
class Batch:
    """Work for a batch of `size` examples, which is equal in all plans.

    Attributes:
        fraction: `factor_batch_fraction` of `KFAC`.
        forward: Multiplications of a forward pass.
        outputs: Number of outputs of all layers.
        rows: Rows of each block.
        statistics: Multiplications of each block's statistics.
        read: Elements that each block's statistics read.
    """

    size: int
    fraction: float | None
    forward: float
    outputs: float
    rows: Sequence[int]
    statistics: Sequence[float]
    read: Sequence[float]

    @classmethod
    def of(
        cls,
        network: Network,
        blocks: Sequence[Block],
        size: int,
        fraction: float | None,
        all_blocks: Sequence[Block],
    ) -> Self:
        """Count the work; `all_blocks` includes blocks of skipped layers."""
        counts = [_statistics(network, block) for block in blocks]
        return cls(
            size,
            fraction,
            network.multiplications(all_blocks),
            network.elements,
            [network.rows(block) for block in blocks],
            [multiplications for multiplications, _ in counts],
            [elements for _, elements in counts],
        )

    def share(self, observers: int) -> float:
        """Return the share of the examples in a worker's statistics."""
        offset = tf.constant(0, tf.int64)
        subsample = choose_subsample(self.fraction, offset, observers)
        if subsample is None:
            return 1.0
        examples = math.ceil(subsample.fraction * self.size)
        return min(self.size, max(subsample.min_examples, examples)) / self.size


def _statistics(network: Network, block: Block) -> tuple[float, float]:
    """Return multiplications of a block's statistics, and elements read."""
    calls, rows = network.calls(block), network.rows(block)
    g = block.factors["G"]
    outputs = sum(math.prod(call.outputs) for call in calls)
    if "A" not in block.factors:  # squares of the gradient of each example
        return 0.0, 2.0 * outputs
    of_g = rows * g.multiplications
    if isinstance(block.factors["A"], Diagonal):  # counts of tokens
        return of_g, outputs
    inputs = sum(
        block.input_multiplications(call.inputs, rows // len(calls))
        for call in calls
    )
    patches = rows * math.prod(block.gradient_shape[:-1])
    return inputs + of_g, patches + outputs


# Among plans within this factor of the fastest, choose the least memory.
_LEVEL = 1.02
# Number of passes through memory: for a layer's output in a step; for a weight,
# factor or decomposition in an update.
_OUTPUT_MOVES, _UPDATE_MOVES = 6, 4
_FLOAT = 4  # bytes of a float32
SOLVERS = ("inverse", "eigen")


class Candidate(NamedTuple):
    """A distribution mode of K-FAC with a solver.

    `fraction` is the share of the workers that are gradient workers of a layer;
    None for modes other than "hybrid_opt".
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
        stages: Seconds of each stage on the slowest worker; decompositions of
            all schedule groups.
        longest_group: Seconds of the slowest schedule group, with messages.
        speed_up: Operations of all decompositions, relative to those of the
            busiest worker in each schedule group.
        received: Maximal bytes that a worker receives, by type of message.
        state: Maximal bytes of curvature state of a worker.
    """

    candidate: Candidate
    stages: Mapping[str, float]
    longest_group: float
    speed_up: float
    received: Mapping[str, int]
    state: Mapping[str, int]

    def _sum(self, *names: str) -> float:
        return sum(self.stages[name] for name in names)

    @property
    def plain(self) -> float:
        """Seconds of a step without updates."""
        return self._sum(
            "first_order", "gradients", "precondition", "share_gradients"
        )

    @property
    def factor(self) -> float:
        """Seconds of a step that updates the factors."""
        return self.plain + self._sum("statistics", "reduce_factors")

    @property
    def inverse(self) -> float:
        """Seconds of the slowest inverse update, without factor update."""
        return self.plain + self.longest_group

    def amortised(self, factor_interval: int, inverse_interval: int) -> float:
        """Return the mean seconds of a step at some update intervals."""
        factors = self._sum("statistics", "reduce_factors")
        inverses = self._sum("decompose", "share_decompositions")
        updates = factors / factor_interval + inverses / inverse_interval
        return self.plain + updates


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its settings, to be distributed.

    Attributes:
        gradients: Bytes of all gradients of the model.
        batch: The work for a batch of one worker.
    """

    blocks: Sequence[Block]
    gradients: int
    batch: Batch
    wire: Wire = dataclasses.field(default_factory=Wire)
    assignment: str | None = None


def compare(
    optimizer: Any, machine: Machine, workers: int, batch: int
) -> list[Estimate]:
    """Estimate the cost of K-FAC for every distribution and solver.

    `optimizer` is a `KFAC` that is attached to a built model; `batch` is the
    number of examples of one worker.
    """
    model = optimizer.bound_model()
    placement = optimizer.method.placement
    load = Workload(
        placement.blocks,
        gradient_bytes(model.trainable_variables),
        Batch.of(
            Network(model, batch),
            placement.blocks,
            batch,
            optimizer.factor_batch_fraction,
            build_registry(model, ()).blocks,
        ),
        placement.wire,
        placement.distribution.assignment,
    )
    return compare_plans(load, list(candidates(workers)), machine, workers)


def recommend(
    estimates: Sequence[Estimate], intervals: tuple[int, int]
) -> Estimate:
    """Return the estimate of least memory within 2 % of the fastest.

    `intervals` are the steps between updates of factors and of inverses.
    """
    bound = _LEVEL * min(e.amortised(*intervals) for e in estimates)
    level = [e for e in estimates if e.amortised(*intervals) <= bound]
    return min(level, key=lambda e: (e.state["total"], e.amortised(*intervals)))


def candidates(workers: int) -> Iterator[Candidate]:
    """Yield all distributions, with all fractions of "hybrid_opt"."""
    for solver, mode in itertools.product(SOLVERS, MODES):
        if MODES[mode].gradient_workers != "fraction":
            yield Candidate(mode, None, solver)
            continue
        # One worker is "mem_opt", all workers are "comm_opt".
        for count in range(2, workers):
            if workers % count == 0:
                yield Candidate(mode, count / workers, solver)


def compare_plans(
    load: Workload,
    candidates: Sequence[Candidate],
    machine: Machine,
    workers: int,
) -> list[Estimate]:
    """Estimate the cost of some distributions of a model."""
    solvers = {c.solver: make_solver(c.solver) for c in candidates}
    costs = {
        name: [BlockCost.of(block, solver, load.wire) for block in load.blocks]
        for name, solver in solvers.items()
    }
    estimates = []
    for candidate in candidates:
        solver = solvers[candidate.solver]
        layers = plan_layers(
            [block.factors for block in load.blocks],
            workers,
            candidate.distribution,
            candidate.fraction,
            load.assignment,
            solver.whole_layers,
        )
        plan = Plan(MODES[candidate.distribution], workers, layers)
        costs_of_solver = costs[candidate.solver]
        estimator = Estimator(plan, load, costs_of_solver, machine, solver)
        estimates.append(estimator.estimate(candidate))
    return estimates


class Estimator(Loads):
    """Seconds of each stage of a plan."""

    def __init__(
        self,
        plan: Plan,
        load: Workload,
        costs: Sequence[BlockCost],
        machine: Machine,
        solver: Solver,
    ) -> None:
        super().__init__(plan)
        self._load = load
        self._costs = costs
        self._machine = machine
        self._solver = solver
        self._groups = assign_groups(
            plan.layers, [block.factors for block in load.blocks]
        )

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the cost of the plan of a candidate."""
        received = self.received(self._costs, self._load.gradients)
        state = self.state(self._costs)
        state["total"] = state["factors"] + state["decompositions"]
        groups = [
            self._group(g) for g in range(max(self._groups, default=0) + 1)
        ]
        statistics = sum(cost.statistics for cost in self._costs)
        stages = {
            "first_order": self._first_order(),
            "gradients": self._all_reduce(self._load.gradients),
            "statistics": self._statistics(),
            "reduce_factors": self._all_reduce(
                statistics * self.plan.reduces_factors
            ),
            "decompose": sum(computed for computed, _ in groups),
            "share_decompositions": sum(sent for _, sent in groups),
            "precondition": self._precondition(),
            "share_gradients": self._share_gradients(received),
        }
        return Estimate(
            candidate,
            stages,
            max((sum(group) for group in groups), default=0.0),
            self._speed_up(),
            {message: int(sums.max()) for message, sums in received.items()},
            {name: int(sums.max()) for name, sums in state.items()},
        )

    def _first_order(self) -> float:
        """Return the seconds of forward pass, backward pass and update."""
        batch, machine = self._load.batch, self._machine
        moved = _OUTPUT_MOVES * batch.outputs * _FLOAT
        return (
            machine.products(3 * batch.forward)
            + moved / machine.memory
            + self._updated(self._load.gradients)
            + machine.overhead
        )

    def _statistics(self) -> float:
        """Return the seconds of the statistics and their averages."""
        batch, machine, plan = self._load.batch, self._machine, self.plan
        share = batch.share(plan.observers)
        seconds = [
            share * (machine.products(m) + 2 * _FLOAT * read / machine.memory)
            for m, read in zip(batch.statistics, batch.read, strict=True)
        ]
        computed: Any = sum(seconds)
        if not plan.mode.reduces_factors:
            computed = self.preconditioned(seconds)  # by the layers' owners
        averages = self.owned([cost.factors for cost in self._costs])
        return float((computed + self._updated(averages)).max())

    def _updated(self, size: Any) -> Any:
        """Return the seconds of an update of `size` bytes of memory."""
        return _UPDATE_MOVES * size / self._machine.memory

    def _group(self, group: int) -> tuple[float, float]:
        """Return seconds of the decompositions and messages of a group."""
        is_due = [other == group for other in self._groups]
        machine, solver = self._machine, self._solver
        # n^3 per second for a decomposition of size n
        rate = machine.inverse if solver.is_explicit else machine.eigen
        seconds = [
            {
                name: due * factor.operations / rate
                for name, factor in block.factors.items()
            }
            for due, block in zip(is_due, self._load.blocks, strict=True)
        ]
        pairs = list(zip(is_due, self._costs, strict=True))
        updated = [due * cost.decomposition for due, cost in pairs]
        moved = self._updated(self.preconditioned(updated))
        computed = (self.owned(seconds) + moved).max()
        parts = [cost.parts if due else {} for due, cost in pairs]
        return computed, self._share_parts(parts)

    def _speed_up(self) -> float:
        """Return the speed-up of an interval's decompositions by the plan."""
        num_groups = max(self._groups, default=0) + 1
        work = np.zeros([num_groups, self.plan.workers])
        layers = zip(
            self._groups, self.plan.layers, self._load.blocks, strict=True
        )
        for group, layer, block in layers:
            for name, factor in block.factors.items():
                work[group, layer.owners[name]] += factor.operations
        busiest = work.max(axis=1).sum()
        return float(work.sum() / busiest) if busiest else 1.0

    def _share_parts(self, parts: Sequence[Mapping[str, int]]) -> float:
        """Return the seconds of the messages with `parts`, bytes by factor."""
        plan = self.plan
        needed = self.preconditioned([sum(sizes.values()) for sizes in parts])
        received = (needed - self.owned(parts)).max()
        owners = {
            layer.owners[name]
            for sizes, layer in zip(parts, plan.layers, strict=True)
            for name in sizes
        }
        # Messages of one column: all columns send at the same time.
        messages = math.ceil(len(owners) / plan.columns)
        messages += math.ceil(received / BUCKET_BYTES)
        members = plan.workers // plan.columns
        return self._machine.broadcast(received, members, messages)

    def _precondition(self) -> float:
        """Return the seconds of the products and of the clip."""
        machine = self._machine
        all_precondition = self.plan.columns == 1
        rows = self._load.batch.rows
        work = [
            self._multiplications(block, count if all_precondition else 0)
            for block, count in zip(self._load.blocks, rows, strict=True)
        ]
        clipped = sum(cost.gradient for cost in self._costs)
        seconds = self.preconditioned([machine.products(w) for w in work])
        return seconds.max() + self._updated(clipped)

    def _multiplications(self, block: Block, rows: int) -> int:
        """Multiplications to precondition `rows` rows; 0 is a whole matrix."""
        factors, solver = block.factors, self._solver
        workers = self.plan.workers
        *stack, inputs, outputs = block.gradient_shape
        vectors = {"A": outputs, "G": inputs}
        products = {name: f.multiplications for name, f in factors.items()}
        takes_rows = solver.takes_rows and not stack and "A" in factors
        if takes_rows and 0 < rows <= most_rows(factors, workers):
            row = sum(products.values())
            if workers > 1:
                return rows * (row + inputs * outputs)
            return rows * row + rows**2 * (inputs + outputs)
        matrix = sum(products[name] * vectors[name] for name in factors)
        # Count twice for an eigensolver: to the eigenbasis and back.
        return matrix if solver.is_explicit else 2 * matrix

    def _share_gradients(self, received: Mapping[str, Numbers]) -> float:
        plan = self.plan
        size = received["preconditioned_gradients"].max()
        senders = {layer.gradient_workers[0] for layer in plan.layers}
        messages = len(senders) + math.ceil(size / BUCKET_BYTES)
        return self._machine.broadcast(size, plan.columns, messages)

    def _all_reduce(self, size: int) -> float:
        messages = math.ceil(size / BUCKET_BYTES)
        return self._machine.all_reduce(size, self.plan.workers, messages)
