r"""Count bytes and operations of K-FAC on a cluster, without a training.

    python tools/studies/plan.py ResNet50 --workers 64 --batch 32
    python tools/studies/plan.py --model my_models:make --workers 8

For every distribution mode and solver, print the operations of the busiest
worker, the bytes that a worker receives in each type of step, and its curvature
state. "speed-up" divides the operations of all decompositions of an interval by
those of the busiest worker in each schedule group. Sizes are maxima over the
workers. "batch" fits into the memory of the mode with the largest state (KAISA,
section 5.4): an example takes the memory of all layer outputs in float32.
`--chart FILE` draws state and bytes over the number of workers.

Operations of statistics and of preconditioning are multiplications of matrix
products, those of decompositions the sum of n^3 over the factors of size n. The
library computes sizes of factors, plans and messages.
"""

import contextlib
import importlib
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import command  # isort: skip, sets the module path
from common.arguments import make_parser_of, positive
from tfkfac import KFAC
from tfkfac.blocks import Block
from tfkfac.blocks.statistics import choose_subsample
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import overridden
from tfkfac.distributed.collectives import gradient_bytes
from tfkfac.distributed.plan import MODES, Plan, plan_layers
from tfkfac.factors import Diagonal
from tfkfac.kfac.placement import BlockCost, Loads, assign_groups
from tfkfac.shell.tables import bytes_text, table
from tfkfac.solvers.base import Solver, most_rows
from tfkfac.solvers.registry import make_solver

SOLVERS = ("inverse", "eigen")
# Steps between two messages, for the chart.
INTERVALS = {"factors": 10, "decompositions": 100}
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

    def rows(self, block: Block) -> int:
        """Return the rows of a block's statistics, summed over all calls."""
        g = block.factors["G"]
        # Both blocks of a separable convolution have its outputs' rows.
        width = getattr(block.layer, "filters", None)
        width = width or math.prod(g.stack_shape) * g.size
        calls = self._calls[id(block.layer)]
        return sum(math.prod(call.outputs) // width for call in calls)

    def statistics(self, block: Block) -> float:
        """Return the multiplications of a block's statistics."""
        if "A" not in block.factors:  # squares of the gradient of each example
            return 0
        calls, rows = self._calls[id(block.layer)], self.rows(block)
        products: float = rows * block.factors["G"].multiplications
        if not isinstance(block.factors["A"], Diagonal):  # counts of tokens
            products += sum(
                block.input_multiplications(call.inputs, rows // len(calls))
                for call in calls
            )
        return products


def share_of_examples(
    batch: int, fraction: float | None, observers: int
) -> float:
    """Return the share of the examples in a worker's statistics."""
    offset = tf.constant(0, tf.int64)
    subsample = choose_subsample(fraction, offset, observers)
    if subsample is None:
        return 1.0
    examples = math.ceil(subsample.fraction * batch)
    return min(batch, max(subsample.min_examples, examples)) / batch


class Mode(NamedTuple):
    """A distribution mode of K-FAC with a solver.

    `fraction` is the share of the workers that are gradient workers of a layer;
    None for modes other than "hybrid_opt".
    """

    distribution: str
    fraction: float | None
    solver: str


class Cost(NamedTuple):
    """The cost of a mode.

    Attributes:
        operations: Operations of the busiest worker, by stage.
        speed_up: Operations of all decompositions, relative to those of the
            busiest worker in each schedule group.
        received: Maximal bytes that a worker receives, by type of message.
        state: Maximal bytes of curvature state of a worker.
    """

    mode: Mode
    operations: Mapping[str, float]
    speed_up: float
    received: Mapping[str, int]
    state: int


def modes(workers: int) -> Iterator[Mode]:
    """Yield all modes, with all fractions of "hybrid_opt"."""
    for solver, mode in itertools.product(SOLVERS, MODES):
        if MODES[mode].gradient_workers != "fraction":
            yield Mode(mode, None, solver)
            continue
        # One worker is "mem_opt", all workers are "comm_opt".
        for count in range(2, workers):
            if workers % count == 0:
                yield Mode(mode, count / workers, solver)


def costs_of(optimizer: Any, workers: int, batch: int) -> list[Cost]:
    """Return the cost of each mode; `batch` is that of one worker."""
    model = optimizer.bound_model()
    network = Network(model, batch)
    placement = optimizer.method.placement
    blocks = placement.blocks
    factors = [block.factors for block in blocks]
    rows = [network.rows(block) for block in blocks]
    statistics = [network.statistics(block) for block in blocks]
    costs = []
    for mode in modes(workers):
        solver = make_solver(mode.solver)
        layers = plan_layers(
            factors,
            workers,
            mode.distribution,
            mode.fraction,
            placement.distribution.assignment,
            solver.whole_layers,
        )
        plan = Plan(MODES[mode.distribution], workers, layers)
        loads = Loads(plan)
        sizes = [BlockCost.of(b, solver, placement.wire) for b in blocks]
        share = share_of_examples(
            batch, optimizer.factor_batch_fraction, plan.observers
        )
        observed: Any = sum(statistics)
        if not plan.mode.reduces_factors:
            observed = loads.preconditioned(statistics).max()  # by the owners
        rows_of = rows if plan.columns == 1 else [0] * len(rows)
        products = [
            precondition(block, solver, count, workers)
            for block, count in zip(blocks, rows_of, strict=True)
        ]
        all_decompositions, busiest = decompositions(plan, factors)
        received = loads.received(
            sizes, gradient_bytes(model.trainable_variables)
        )
        costs.append(
            Cost(
                mode,
                {
                    "statistics": share * observed,
                    "decompositions": busiest,
                    "precondition": loads.preconditioned(products).max(),
                },
                all_decompositions / busiest if busiest else 1.0,
                {name: int(sums.max()) for name, sums in received.items()},
                int(np.sum([*loads.state(sizes).values()], 0).max()),
            )
        )
    return costs


def decompositions(
    plan: Plan, factors: Sequence[Mapping[str, Any]]
) -> tuple[float, float]:
    """Return the operations of an interval: all, and the busiest worker's."""
    groups = assign_groups(plan.layers, factors)
    work = np.zeros([max(groups, default=0) + 1, plan.workers])
    layers = zip(groups, plan.layers, factors, strict=True)
    for group, layer, by_name in layers:
        for name, factor in by_name.items():
            work[group, layer.owners[name]] += factor.operations
    return float(work.sum()), float(work.max(axis=1).sum())


def precondition(block: Block, solver: Solver, rows: int, workers: int) -> int:
    """Return the multiplications for `rows` rows; 0 is a whole matrix."""
    factors = block.factors
    *stack, inputs, outputs = block.gradient_shape
    products = {name: f.multiplications for name, f in factors.items()}
    takes_rows = solver.takes_rows and not stack and "A" in factors
    if takes_rows and 0 < rows <= most_rows(factors, workers):
        row = sum(products.values())
        if workers > 1:
            return rows * (row + inputs * outputs)
        return rows * row + rows**2 * (inputs + outputs)
    vectors = {"A": outputs, "G": inputs}
    matrix = sum(products[name] * vectors[name] for name in factors)
    # Count twice for an eigensolver: to the eigenbasis and back.
    return matrix if solver.is_explicit else 2 * matrix


# ---------------------------------------------------------------- the report
def counts_text(optimizer: Any) -> str:
    """Count the elements of factors and weights."""
    registry = optimizer.method.placement.registry
    factors = sum(
        factor.elements
        for block in registry.blocks
        for factor in block.factors.values()
    )
    rest = sum(leftover.weights for leftover in registry.leftovers)
    return (
        f"{len(registry.blocks)} blocks: {factors / 1e6:.2f} M elements of "
        f"factors, {registry.covered / 1e6:.2f} M weights preconditioned, "
        f"{rest / 1e6:.2f} M not."
    )


def plan_text(costs: Sequence[Cost], model: keras.Model, batch: int) -> str:
    """Return the table of all modes; operations in 10^9."""
    stages = "precondition", "statistics", "decompositions"
    header = (
        "Solver",
        "Distribution",
        *(f"{stage}, G" for stage in stages),
        "speed-up",
        "plain recv.",
        "factor +",
        "inverse +",
        "State",
        "batch",
    )
    example = 4 * Network(model, 1).elements
    rows: list[tuple[str, ...]] = []
    for mode, operations, speed_up, received, state in costs:
        fraction = "" if mode.fraction is None else f" {mode.fraction:.4g}"
        plain = received["gradients"] + received["preconditioned_gradients"]
        sizes = plain, received["factors"], received["decompositions"], state
        most = max(c.state for c in costs if c.mode.solver == mode.solver)
        rows.append(
            (
                mode.solver,
                mode.distribution + fraction,
                *(f"{operations[stage] / 1e9:.4g}" for stage in stages),
                f"{speed_up:.4g}",
                *map(bytes_text, sizes),
                f"{batch + (most - state) // example}",
            )
        )
    return "\n".join(table(header, rows))


def draw(optimizer: Any, workers: int, batch: int, path: pathlib.Path) -> None:
    """Draw state and bytes over the workers, for the explicit inverse."""
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, ...]]] = {}
    for power in range(1, workers.bit_length()):
        for mode, *_, received, state in costs_of(optimizer, 2**power, batch):
            if mode.solver == SOLVERS[0] and mode.fraction in (None, 0.5):
                name = mode.distribution + ", 0.5" * (mode.fraction is not None)
                total = sum(received[n] / INTERVALS.get(n, 1) for n in received)
                point = 2**power, state / 1e6, total / 1e6
                lines.setdefault(name, []).append(point)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name, points in lines.items():
        counts, *values = np.transpose(points)
        for axis, value in zip(axes, values, strict=True):
            axis.semilogx(counts, value, "o-", base=2, label=name)
    titles = "curvature state of a worker", "bytes received in a step, mean"
    for axis, text in zip(axes, titles, strict=True):
        axis.set(title=f"{text}, MB", xlabel="workers")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0)
    axes[1].legend(frameon=False)
    command.save_chart(figure, path)


# ------------------------------------------------------------ the command line
def max_factor_dim(text: str) -> dict[str, int | None]:
    """Return the argument of `KFAC` for N rows, or for "none"."""
    return {"max_factor_dim": None if text == "none" else positive(text)}


def build(name: str) -> keras.Model:
    """Build a model of `keras.applications`, or by MODULE:FUNCTION."""
    module, _, function = name.rpartition(":")
    if module:
        sys.path.append("")  # the current folder
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--model {name}: {error}") from error
        return make()
    make = getattr(keras.applications, name, None)
    if not callable(make):
        raise ValueError(
            f"MODEL must be of keras.applications. Received: {name!r}"
        )
    return make(weights=None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser_of(__doc__)
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="one of keras.applications")
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function without arguments that returns a model of yours",
    )
    add(
        "--max-factor-dim",
        type=max_factor_dim,
        default={},
        metavar="N",
        help="argument of KFAC; none for exact factors",
    )
    add("--workers", type=positive, default=1, metavar="N")
    add("--batch", type=positive, default=32, metavar="N", help="of a worker")
    add("--chart", type=pathlib.Path, metavar="FILE", help="PNG or SVG")
    options = parser.parse_args(arguments)
    if (options.name is None) == (options.model is None):
        parser.error("either MODEL or --model is needed")
    try:
        model = build(options.name or options.model)
    except ValueError as error:
        parser.error(str(error))
    optimizer = KFAC(step="natural", **options.max_factor_dim).attach(model)
    print(counts_text(optimizer))
    costs = costs_of(optimizer, options.workers, options.batch)
    print(plan_text(costs, model, options.batch))
    if options.chart:
        draw(optimizer, options.workers, options.batch, options.chart)


if __name__ == "__main__":
    main()
