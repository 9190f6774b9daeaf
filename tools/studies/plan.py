r"""Estimate the cost of K-FAC on a cluster, without a training.

    python tools/studies/plan.py ResNet50 --workers 64 --batch 32 \
        --bandwidth 100Gbit --latency 5us --flops 14T
    python tools/studies/plan.py --papers   # DP-KFAC's and KAISA's figures

For every distribution and solver, print the seconds of a plain step, of a step
that updates the factors and of the longest step that updates inverses, the
speed-up of the decompositions of an interval over one worker, the mean step at
some intervals, the bytes that a worker receives in each type of step, and its
curvature state. Times and sizes are maxima over the workers. Then print the
larger batch size that fits into the memory saved by DP-KFAC.
"""

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from command import intervals  # isort: skip, sets the module path
from common.arguments import make_parser_of, positive
from cost_model import Estimate, Machine, Network, compare, recommend
from tfkfac import KFAC
from tfkfac.shell.tables import bytes_text, table

_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "K": 1e3,
             "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}  # fmt: skip
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([numkKMGTP]?)(.*)")


def quantity(
    units: dict[str, float], zero: bool = False
) -> Callable[[str], float]:
    """Return a parser of a number with a prefix and a unit.

    `units` has the factor of each unit, "" for no unit; `zero` allows 0.
    """
    names = " or ".join(repr(name) for name in units if name)

    def parse(text: str) -> float:
        match = _NUMBER.fullmatch(text.strip())
        unit = match[3].removesuffix("/s") if match else None
        if match is None or unit not in units:
            raise argparse.ArgumentTypeError(
                f"must be a number with a prefix, if any, and {names}; "
                f"received {text!r}"
            )
        value = float(match[1]) * _PREFIXES[match[2]] * units[unit]
        if not math.isfinite(value) or (value == 0 and not zero):
            raise argparse.ArgumentTypeError(
                f"must be finite and above 0; received {text!r}"
            )
        return value

    return parse


flops = quantity({"": 1.0, "flop": 1.0, "FLOP": 1.0})
bandwidth = quantity({"bit": 1 / 8, "b": 1 / 8, "B": 1.0})
latency = quantity({"s": 1.0}, zero=True)


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


Intervals = tuple[int, int]


def machine_text(machine: Machine) -> str:
    """Describe the machine."""
    return (
        f"A worker: {machine.flops / 1e12:.3g} TFLOP/s of products; n^3 of "
        f"decompositions {machine.inverse / 1e9:.3g} G/s (inverse), "
        f"{machine.eigen / 1e9:.3g} G/s (eigen); {machine.memory / 1e9:.3g} "
        f"GB/s of memory, {machine.bandwidth / 1e9:.3g} GB/s and "
        f"{machine.latency * 1e6:.3g} us between workers."
    )


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


def plan_text(
    estimates: Sequence[Estimate], intervals: Sequence[Intervals]
) -> str:
    """Return all distributions, and the recommendation."""
    header = (
        "Solver",
        "Distribution",
        "plain ms",
        "factor ms",
        "inverse ms",
        "speed-up",
        *(f"mean ms at {f},{i}" for f, i in intervals),
        "plain recv.",
        "factor +",
        "inverse +",
        "State",
    )
    lines = table(header, [_row(e, intervals) for e in estimates])
    best = recommend(estimates, intervals[0])
    lines += ["", f"Recommended: {_choice(best, intervals[0])}"]
    if best.candidate.distribution == "dp_kfac":
        others = [e for e in estimates if e.candidate.distribution != "dp_kfac"]
        other = recommend(others, intervals[0])
        lines += [
            "Its factors are computed from the batch of one worker. Of the "
            "modes with the results of a single worker:",
            f"Recommended: {_choice(other, intervals[0])}",
        ]
    return "\n".join(lines)


def batch_text(
    estimates: Sequence[Estimate], model: keras.Model, batch: int
) -> str:
    """Return the batch size that DP-KFAC's saved memory allows.

    An example takes the memory of all layer outputs in float32.
    """
    state = {
        e.candidate.distribution: e.state["total"]
        for e in estimates
        if e.candidate.solver == "inverse"
    }
    saved = state["comm_opt"] - state["dp_kfac"]
    example = 4 * Network(model, 1).elements
    return (
        f"dp_kfac saves {bytes_text(saved)} of a worker against comm_opt: "
        f"{saved / example:.2f} examples of {bytes_text(example)} of layer "
        f"outputs. A batch of {batch} becomes {batch + saved // example}."
    )


def _choice(estimate: Estimate, intervals: Intervals) -> str:
    factor, inverse = intervals
    mode, fraction, solver = estimate.candidate
    argument = ""
    if fraction is not None:
        argument = f"gradient_worker_fraction={fraction:g}, "
    return (
        f'KFAC(distribution="{mode}", {argument}solver="{solver}"), '
        f"{1e3 * estimate.amortised(*intervals):.4g} ms a step at intervals "
        f"{factor} and {inverse}, "
        f"{bytes_text(estimate.state['total'])} of state"
    )


def _row(estimate: Estimate, intervals: Sequence[Intervals]) -> tuple[str, ...]:
    seconds = [estimate.plain, estimate.factor, estimate.inverse]
    means = [estimate.amortised(*pair) for pair in intervals]
    received = estimate.received
    plain = received["gradients"] + received["preconditioned_gradients"]
    sizes = [plain, received["factors"], received["decompositions"]]
    return (
        estimate.candidate.solver,
        estimate.candidate.text,
        *(f"{1e3 * value:.4g}" for value in seconds),
        f"{estimate.speed_up:.4g}",
        *(f"{1e3 * value:.4g}" for value in means),
        *(bytes_text(size) for size in (*sizes, estimate.state["total"])),
    )


# ------------------------------------------------------------ the command line
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
    add("--flops", type=flops, help="of matrix products, as 14T")
    add("--bandwidth", type=bandwidth, help="as 100Gbit or 12.5GB")
    add("--latency", type=latency, help="of a message, as 5us")
    add(
        "--intervals",
        nargs="+",
        type=intervals,
        default=[(10, 100), (1, 1)],
        metavar="FACTOR,INVERSE",
        help="update intervals (default: 10,100 1,1); the recommendation is "
        "for the first",
    )
    add("--papers", action="store_true", help="print the papers' figures")
    options = parser.parse_args(arguments)
    if [options.name, options.model, options.papers or None].count(None) != 2:
        parser.error("either MODEL, --model or --papers is needed")
    if options.papers:
        import papers

        print(papers.report())
        return
    needed = ["flops"] + ["bandwidth", "latency"] * (options.workers > 1)
    for name in needed:
        if getattr(options, name) is None:
            parser.error(f"--{name} is needed for {options.workers} workers")
    try:
        model = build(options.name or options.model)
    except ValueError as error:
        parser.error(str(error))
    # One worker needs no bandwidth.
    machine = Machine(
        options.flops, options.bandwidth or 1.0, options.latency or 0.0
    )
    optimizer = KFAC(step="natural", **options.max_factor_dim).attach(model)
    print(machine_text(machine))
    print(counts_text(optimizer))
    estimates = compare(optimizer, machine, options.workers, options.batch)
    print(plan_text(estimates, options.intervals))
    if options.workers > 1:
        print(batch_text(estimates, model, options.batch))


if __name__ == "__main__":
    main()
