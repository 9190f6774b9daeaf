"""Cost model of K-FAC: seconds, bytes and memory of each distribution.

Sizes of factors, plans and messages are those of the library. Seconds follow
from them and the numbers of a `Machine`.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import choose_subsample
from tfkfac.checks import check_choice, check_count, check_positive, check_range
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import overridden
from tfkfac.distributed.collectives import BUCKET_BYTES, gradient_bytes
from tfkfac.distributed.plan import MODES, Plan, plan_layers
from tfkfac.factors import Diagonal
from tfkfac.factors.base import Wire
from tfkfac.kfac.placement import BlockCost, Loads, Numbers
from tfkfac.solvers import SOLVERS
from tfkfac.solvers.registry import make_solver

# What is not known of a machine, in terms of its products of matrices: orders
# of magnitude, of which CPUs and GPUs are on different sides.
_INVERSE, _EIGEN, _MEMORY = 5.0, 150.0, 20.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds of the workers, which are all alike, and of their network.

    Attributes:
        flops: Floating point operations a second of products of matrices.
        inverse: Cholesky inverses of a large size n: n^3 a second.
        eigen: Eigen-decompositions of a large size n: n^3 a second.
        memory: Bytes a second that pass by where little is computed.
        bandwidth: Bytes a second that a worker receives.
        latency: Seconds until a small message is there.
        overhead: Seconds of a step that are none of these.
    """

    flops: float
    inverse: float
    eigen: float
    memory: float
    bandwidth: float
    latency: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "inverse", "eigen", "memory", "bandwidth"):
            check_positive(name, getattr(self, name))
        for name in ("latency", "overhead"):
            check_range(name, getattr(self, name), 0.0)

    @classmethod
    def of(
        cls, flops: float, bandwidth: float, latency: float, **known: Any
    ) -> Self:
        """A machine of which only the usual three numbers are known.

        A Cholesky inverse of size n is taken for as long as products of 5 n^3
        operations, an eigen-decomposition of 150 n^3, and a byte of memory for
        20 operations.

        Args:
            flops: See the attributes.
            bandwidth: See the attributes.
            latency: See the attributes.
            **known: Others that are known.
        """
        flops = check_positive("flops", flops)
        guessed = {
            "inverse": flops / _INVERSE,
            "eigen": flops / _EIGEN,
            "memory": flops / _MEMORY,
        }
        return cls(
            flops=flops,
            bandwidth=bandwidth,
            latency=latency,
            **{**guessed, **known},
        )

    def products(self, multiplications: float) -> float:
        """Seconds of products of matrices.

        Args:
            multiplications: Their number; an addition comes with each.
        """
        return 2 * multiplications / self.flops

    def all_reduce(self, size: float, workers: int, messages: int = 1) -> float:
        """Seconds in which workers add up `size` bytes, in some messages.

        Each receives the data twice but for its own part. In a ring a message
        makes `2 (P - 1)` hops, up and down a tree `2 log2 P`: libraries take
        what is quicker.

        Args:
            size: Bytes that are added up.
            workers: Number of workers.
            messages: Number of messages.
        """
        if workers == 1 or not size:
            return 0.0
        ring = 2 * (workers - 1)
        tree = 2 * math.ceil(math.log2(workers))
        received = 2 * size * (workers - 1) / workers
        hops = messages * min(ring, tree)
        return received / self.bandwidth + hops * self.latency

    def broadcast(self, size: float, members: int, messages: int = 1) -> float:
        """Seconds in which a worker receives `size` bytes of others.

        A message makes `P - 1` hops round a ring, as with NCCL.

        Args:
            size: Bytes that it receives.
            members: Size of the groups in which they are sent.
            messages: Number of messages.
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
    """The calls of a model's layers for a batch; traced, not run.

    Args:
        model: A functional or sequential model.
        batch: Examples of a batch.
        size: The value of unknown sizes of an input; None if there is none.

    Attributes:
        elements: Number of outputs of all layers.

    Raises:
        ValueError: If the model has no known inputs, or a size is missing.
    """

    def __init__(
        self, model: keras.Model, batch: int, size: int | None = None
    ) -> None:
        self._calls: dict[int, list[CallShapes]] = {}
        specs = keras.tree.map_structure(
            lambda tensor: _spec(tensor, batch, size), _inputs_of(model)
        )
        layers = [one for one in all_layers(model) if one is not model]
        with contextlib.ExitStack() as stack:
            for layer in layers:
                note = self._noting(layer)
                stack.enter_context(overridden(layer, "call", note))
            run = tf.function(lambda x: model(x, training=True))
            run.get_concrete_function(specs)
        self.elements = sum(
            math.prod(call.outputs)
            for layer in layers
            if not children(layer)
            for call in self._calls[id(layer)]
        )

    def _noting(self, layer: keras.layers.Layer) -> Callable[..., Any]:
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
        """The calls of a block's layer."""
        return self._calls[id(block.layer)]

    def rows(self, block: Block) -> int:
        """Rows of a block; for a shared layer, those of all its calls."""
        g = block.factors["G"]
        # Not the outputs of one half of a separable convolution.
        width = getattr(block.layer, "filters", None)
        width = width or math.prod(g.stack_shape) * g.size
        return sum(math.prod(c.outputs) // width for c in self.calls(block))

    def multiplications(self, blocks: Sequence[Block]) -> int:
        """Multiplications of a forward pass through the layers of blocks.

        An embedding and what only scales multiply next to nothing.
        """
        return sum(
            self.rows(block) * math.prod(block.gradient_shape)
            for block in blocks
            if not isinstance(block.factors.get("A"), Diagonal | None)
        )


def _inputs_of(model: keras.Model) -> Any:
    try:
        # A sequential model knows its one input by this name only.
        return model.inputs[0] if len(model.inputs) == 1 else model.input
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"Model '{model.name}' must be functional or sequential, with "
            f"known inputs. {error}"
        ) from error


def _spec(
    tensor: keras.KerasTensor, batch: int, size: int | None
) -> tf.TensorSpec:
    sizes = [size if n is None else n for n in tensor.shape[1:]]
    if None in sizes:
        raise ValueError(
            f"Input '{tensor.name}' has the shape {tensor.shape}, whose sizes "
            "but the first must be known."
        )
    return tf.TensorSpec([batch, *sizes], tensor.dtype)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The work of a batch of `size` examples, the same under all plans.

    Attributes:
        fraction: Share of them that statistics take, see `KFAC`.
        forward: Multiplications of a forward pass.
        outputs: Number of outputs of all layers.
        rows: Rows of each block.
        statistics: Multiplications of each block's, of all examples.
        read: Elements of the rows or images that these take.
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
        every: Sequence[Block],
    ) -> Self:
        """Counts the work of a batch of a network.

        `every` are its blocks if none of the layers is skipped.
        """
        counts = [_statistics(network, block) for block in blocks]
        return cls(
            size,
            fraction,
            network.multiplications(every),
            network.elements,
            [network.rows(block) for block in blocks],
            [multiplications for multiplications, _ in counts],
            [elements for _, elements in counts],
        )

    def share(self, observers: int) -> float:
        """Share of the examples that the statistics of a worker take.

        Those of all observers are added up.
        """
        part = choose_subsample(
            self.fraction, tf.constant(0, tf.int64), observers
        )
        if part is None:
            return 1.0
        least = min(self.size, part.least)
        return max(least, math.ceil(part.fraction * self.size)) / self.size


def _statistics(network: Network, block: Block) -> tuple[float, float]:
    """Multiplications of a block's statistics, and elements they take."""
    calls, rows = network.calls(block), network.rows(block)
    g = block.factors["G"]
    outputs = sum(math.prod(call.outputs) for call in calls)
    if "A" not in block.factors:  # an example's gradient, element by element
        return 0.0, 2.0 * outputs
    of_g = rows * g.multiplications
    if isinstance(block.factors["A"], Diagonal):  # tokens are counted
        return of_g, outputs
    inputs = sum(
        block.input_multiplications(call.inputs, rows // len(calls))
        for call in calls
    )
    patches = rows * math.prod(block.gradient_shape[:-1])
    return inputs + of_g, patches + outputs


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
    """

    blocks: Sequence[Block]
    turns: Sequence[int]
    gradients: int
    wire: Wire = dataclasses.field(default_factory=Wire)
    assignment: str | None = None
    batch: Batch | None = None
    passes: int = 0


def compare(
    optimizer: Any,
    machine: Machine,
    workers: int,
    batch: int,
    *,
    solvers: Sequence[str] = ("inverse", "eigen"),
    size: int | None = None,
    passes: int = 0,
) -> list[Estimate]:
    """Estimates what K-FAC costs on a cluster, for every distribution.

    >>> optimizer = tfkfac.KFAC().attach(model)
    >>> machine = Machine.of(14e12, 12.5e9, 5e-6)
    >>> compare(optimizer, machine, workers=64, batch=32)

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
    placement = optimizer.method.placement
    work = Batch.of(
        Network(model, batch, size),
        placement.blocks,
        batch,
        optimizer.factor_batch_fraction,
        build_registry(model, ()).blocks,
    )
    load = Workload(
        placement.blocks,
        placement.schedule_groups,
        gradient_bytes(model.trainable_variables),
        placement.wire,
        placement.distribution.assignment,
        work,
        passes,
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
    solvers = {name: make_solver(name) for _, _, name in some}
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
        seconds = [
            {
                name: here * count / self._rate
                for name, (count, _) in work.decompositions.items()
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
