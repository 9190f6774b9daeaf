r"""Count bytes and operations of K-FAC on a cluster, without a training.

    python tools/studies/plan.py ResNet50 --workers 64 --batch 32
    python tools/studies/plan.py --model my_models:make --workers 8

For every distribution mode and solver, print the operations of the busiest
worker's decompositions, the bytes that a worker receives in each type of step,
and its curvature state. Operations are the sum of n^3 over the factors of size
n. "speed-up" divides those of all decompositions of an interval by those of the
busiest worker in each schedule group. Sizes are maxima over the workers.
"batch" fits into the memory of the mode with the largest state (KAISA, section
5.4): an example takes the memory of all layer outputs in float32.
`--chart FILE` draws state and bytes over the number of workers.
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
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import overridden
from tfkfac.distributed.collectives import gradient_bytes
from tfkfac.distributed.plan import MODES, Plan, plan_layers
from tfkfac.kfac.placement import BlockCost, Loads, assign_groups
from tfkfac.shell.tables import bytes_text, table
from tfkfac.solvers.registry import make_solver

SOLVERS = ("inverse", "eigen")
# Steps between two messages, for the chart.
INTERVALS = {"factors": 10, "decompositions": 100}


def count_outputs(model: keras.Model) -> int:
    """Count the outputs of all layers for an example, by tracing the model.

    The model is functional or sequential, with known sizes of its inputs.
    """
    counts: list[int] = []

    def call(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = below(*args, **kwargs)
        last, *_ = keras.tree.flatten(outputs)
        if tf.is_tensor(last):
            counts.append(math.prod(last.shape))
        return outputs

    # Pass a single input as a tensor, as a sequential model expects.
    is_single = len(model.inputs) == 1
    specs = keras.tree.map_structure(
        lambda t: tf.TensorSpec([1, *t.shape[1:]], t.dtype),
        model.inputs[0] if is_single else model.input,
    )
    with contextlib.ExitStack() as stack:
        for layer in all_layers(model):
            if layer is not model and not children(layer):
                stack.enter_context(overridden(layer, "call", call))
        run = tf.function(lambda x: model(x, training=True))
        run.get_concrete_function(specs)
    return sum(counts)


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
        decompositions: Operations of the busiest worker in an interval.
        speed_up: Operations of all decompositions, relative to those of the
            busiest worker in each schedule group.
        received: Maximal bytes that a worker receives, by type of message.
        state: Maximal bytes of curvature state of a worker.
    """

    mode: Mode
    decompositions: float
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


def costs_of(optimizer: Any, workers: int) -> list[Cost]:
    """Return the cost of each mode."""
    model = optimizer.bound_model()
    placement = optimizer.method.placement
    blocks = placement.blocks
    factors = [block.factors for block in blocks]
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
        all_decompositions, busiest = decompositions(plan, factors)
        received = loads.received(
            sizes, gradient_bytes(model.trainable_variables)
        )
        costs.append(
            Cost(
                mode,
                busiest,
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
    header = (
        "Solver",
        "Distribution",
        "decompositions, G",
        "speed-up",
        "plain recv.",
        "factor +",
        "inverse +",
        "State",
        "batch",
    )
    example = 4 * count_outputs(model)
    rows: list[tuple[str, ...]] = []
    for mode, decompositions, speed_up, received, state in costs:
        fraction = "" if mode.fraction is None else f" {mode.fraction:.4g}"
        plain = received["gradients"] + received["preconditioned_gradients"]
        sizes = plain, received["factors"], received["decompositions"], state
        most = max(c.state for c in costs if c.mode.solver == mode.solver)
        rows.append(
            (
                mode.solver,
                mode.distribution + fraction,
                f"{decompositions / 1e9:.4g}",
                f"{speed_up:.4g}",
                *map(bytes_text, sizes),
                f"{batch + (most - state) // example}",
            )
        )
    return "\n".join(table(header, rows))


def draw(optimizer: Any, workers: int, path: pathlib.Path) -> None:
    """Draw state and bytes over the workers, for the explicit inverse."""
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, ...]]] = {}
    for power in range(1, workers.bit_length()):
        for mode, *_, received, state in costs_of(optimizer, 2**power):
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
    costs = costs_of(optimizer, options.workers)
    print(plan_text(costs, model, options.batch))
    if options.chart:
        draw(optimizer, options.workers, options.chart)


if __name__ == "__main__":
    main()
