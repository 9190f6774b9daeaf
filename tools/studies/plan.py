r"""Say what K-FAC would cost on a cluster, before anything is trained.

    python tools/studies/plan.py ResNet50 --workers 64 --batch 32 \
        --bandwidth 100Gbit --latency 5us --flops 14T
    python tools/studies/plan.py --papers   # DP-KFAC's and KAISA's figures

For every distribution and solver: seconds of a plain step, of a step that
updates the factors and of the longest step that updates inverses, the mean step
at some intervals, bytes that a worker receives in each of these steps, and its
curvature state. All numbers are those of the worker that has most.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from command import intervals, key_value, positive
from cost_model import Estimate, Machine, compare, recommend
from tfkfac import KFAC
from tfkfac.shell.tables import bytes_text, table

if TYPE_CHECKING:
    from papers import Reproduction

_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "K": 1e3,
             "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}  # fmt: skip
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([numkKMGTP]?)(.*)")


def quantity(
    units: dict[str, float], zero: bool = False
) -> Callable[[str], float]:
    """Parser of a number with a prefix and a unit.

    Args:
        units: What each unit is in that of the result; "" for none.
        zero: Whether it may be 0.
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


def build(name: str, size: int | None) -> keras.Model:
    """Builds a model without its weights.

    Args:
        name: One of `keras.applications`.
        size: Height and width of its images; None is the usual one.

    Raises:
        ValueError: If there is none of that name, or it refuses the size.
    """
    make = getattr(keras.applications, name, None)
    if not callable(make):
        known = sorted(
            key
            for key, value in vars(keras.applications).items()
            if callable(value)
        )
        raise ValueError(
            f"MODEL must be one of {', '.join(known)}. Received: {name!r}"
        )
    shape = None if size is None else (size, size, 3)
    return make(weights=None, input_shape=shape)


Intervals = tuple[int, int]
_PAPER_BOUND = 0.25  # relative errors beyond this are marked


def machine_text(machine: Machine) -> str:
    """What is known of the machine."""
    return (
        f"A worker: {machine.flops / 1e12:.3g} TFLOP/s of products; n^3 of "
        f"decompositions {machine.inverse / 1e9:.3g} G/s (inverse), "
        f"{machine.eigen / 1e9:.3g} G/s (eigen); {machine.memory / 1e9:.3g} "
        f"GB/s of memory, {machine.bandwidth / 1e9:.3g} GB/s and "
        f"{machine.latency * 1e6:.3g} us between workers."
    )


def counts_text(optimizer: Any) -> str:
    """Elements of the factors and weights."""
    registry = optimizer.method.placement.registry
    factors = sum(
        factor.elements
        for block in registry.blocks
        for factor in block.factors.values()
    )
    rest = sum(left.weights for left in registry.leftovers)
    return (
        f"{len(registry.blocks)} blocks: {factors / 1e6:.2f} M elements of "
        f"factors, {registry.covered / 1e6:.2f} M weights preconditioned, "
        f"{rest / 1e6:.2f} M not."
    )


def plan_text(
    estimates: Sequence[Estimate], intervals: Sequence[Intervals]
) -> str:
    """All distributions, and the one to take."""
    header = (
        "Solver",
        "Distribution",
        "plain ms",
        "factor ms",
        "inverse ms",
        *(f"mean ms at {f},{i}" for f, i in intervals),
        "plain recv.",
        "factor +",
        "inverse +",
        "State",
    )
    lines = table(header, [_row(one, intervals) for one in estimates])
    best = recommend(estimates, *intervals[0])
    lines += ["", f"Recommended: {_choice(best, intervals[0])}"]
    if best.candidate.distribution == "dp_kfac":
        rest = [
            one for one in estimates if one.candidate.distribution != "dp_kfac"
        ]
        other = recommend(rest, *intervals[0])
        lines += [
            "Its factors are of one worker's batch, which makes it another "
            "method. Of those that agree with one worker:",
            f"Recommended: {_choice(other, intervals[0])}",
        ]
    return "\n".join(lines)


def _choice(one: Estimate, intervals: Intervals) -> str:
    factor, inverse = intervals
    mode, fraction, solver = one.candidate
    given = (
        "" if fraction is None else f"gradient_worker_fraction={fraction:g}, "
    )
    return (
        f'KFAC(distribution="{mode}", {given}solver="{solver}"), '
        f"{1e3 * one.amortised(factor, inverse):.4g} ms a step at intervals "
        f"{factor} and {inverse}, {bytes_text(one.state['total'])} of state"
    )


def _row(one: Estimate, intervals: Sequence[Intervals]) -> tuple[str, ...]:
    seconds = [one.plain, one.factor, one.inverse]
    seconds += [one.amortised(*pair) for pair in intervals]
    received = one.received
    plain = received["gradients"] + received["preconditioned_gradients"]
    sizes = [plain, received["factors"], received["decompositions"]]
    return (
        one.candidate.solver,
        one.candidate.text,
        *(f"{1e3 * value:.4g}" for value in seconds),
        *(bytes_text(size) for size in (*sizes, one.state["total"])),
    )


# ------------------------------------------------------------------ papers
def papers_text(found: "Reproduction", stale: Intervals) -> str:
    """The papers' figures beside the model's.

    Args:
        found: What the model says.
        stale: Steps between KAISA's stale updates.
    """
    machine = found.machine
    lines = [
        "DP-KFAC, table 2: elements of factors N_f and of weights N_g",
        *(
            f"  {name}: {c.factors / 1e6:.2f} M, {c.weights / 1e6:.2f} M"
            for name, c in found.counts.items()
        ),
        "  (the paper: ResNet-50 153.9 M, 25.6 M)",
        "",
        "DP-KFAC, table 5: seconds of an iteration on 64 GPUs. Fitted to "
        f"ResNet-50 alone: {machine.bandwidth / 1e9:.3g} GB/s, "
        f"{machine.overhead:.3g} s of overhead",
    ]
    rows = []
    for name, (ours, theirs) in found.times.items():
        for mode in ours._fields:
            mine, paper = getattr(ours, mode), getattr(theirs, mode)
            ratio = (ours.dp_kfac / mine) / (theirs.dp_kfac / paper) - 1
            rows.append(
                (
                    name,
                    mode,
                    f"{paper:.3f}",
                    f"{mine:.3f}",
                    f"{theirs.dp_kfac / paper:.3f}",
                    f"{ours.dp_kfac / mine:.3f}",
                    _marked(ratio, _PAPER_BOUND),
                )
            )
    header = ("Network", "Distribution", "paper s", "model s",
              "paper dp/", "model dp/", "off by")  # fmt: skip
    lines += [*table(header, rows), "", *_kaisa(found, stale)]
    return "\n".join(lines)


def _kaisa(found: "Reproduction", stale: Intervals) -> list[str]:
    lines = [
        "KAISA: ResNet-50, eigen, quickest first. Stale: factors are renewed "
        f"every {stale[0]} steps, decompositions every {stale[1]}"
    ]
    clusters = {"fitted": found.fitted, "V100": found.own}
    for cluster, kaisa in clusters.items():
        for updates, times in kaisa._asdict().items():
            order = sorted(times, key=times.__getitem__)
            text = " < ".join(f"{mode} {times[mode]:.4g} s" for mode in order)
            lines.append(f"  {cluster} cluster, {updates} updates: {text}")
    return [
        *lines,
        "  comm_opt is quicker than mem_opt with stale updates by "
        f"{found.fitted.gain:.1%} (fitted) and {found.own.gain:.1%} (V100); "
        "the paper says 24.4 %.",
        "  mem_opt loses by the hops of its broadcasts, 63 round a ring for "
        "each layer's owner: it would",
        f"  be the 24.4 % with {1e6 * found.hop:.1f} us for each of them, "
        "where 5 us are assumed.",
    ]


def _marked(error: float, bound: float) -> str:
    return f"{error:+.0%}{' (!)' if abs(error) > bound else ''}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check(parser, options)
    if options.papers:
        import papers

        print(papers_text(papers.reproduce(), papers.STALE))
        return
    plan(parser, options)


def plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Compares the distributions of a model."""
    # Of one worker nothing is sent.
    bandwidth, latency = options.bandwidth or 1.0, options.latency or 0.0
    try:
        machine = Machine.of(options.flops, bandwidth, latency)
        # An optimizer does not keep its model.
        model = build(options.model, options.image_size)
        optimizer = KFAC(**dict(options.kfac)).attach(model)
        estimates = compare(
            optimizer,
            machine,
            options.workers,
            options.batch,
            solvers=options.solvers,
            size=options.image_size,
            passes=options.fisher_passes,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(machine_text(machine))
    print(counts_text(optimizer))
    print(plan_text(estimates, options.intervals))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model of keras.applications",
    )
    add("--workers", type=positive, default=1, metavar="N")
    add(
        "--batch",
        type=positive,
        default=32,
        metavar="N",
        help="examples of a worker (default: 32)",
    )
    add("--image-size", type=positive, metavar="PIXELS")
    add("--flops", type=flops, help="of products of matrices, as 14T")
    add(
        "--bandwidth",
        type=bandwidth,
        help="that a worker receives, as 100Gbit or 12.5GB",
    )
    add("--latency", type=latency, help="of a message, as 5us")
    add(
        "--intervals",
        nargs="+",
        type=intervals,
        default=[(10, 100), (1, 1)],
        metavar="FACTOR,INVERSE",
        help="steps between updates (default: 10,100 1,1); the recommendation "
        "is for the first",
    )
    add("--solvers", nargs="+", default=["inverse", "eigen"], metavar="NAME")
    add(
        "--fisher-passes",
        type=int,
        default=0,
        metavar="N",
        help='backward passes more for factors: 1 for fisher="monte_carlo"',
    )
    add(
        "--kfac",
        nargs="+",
        type=key_value,
        default=[],
        metavar="KEY=VALUE",
        help="arguments of KFAC, values in JSON",
    )
    add("--papers", action="store_true", help="the papers' figures, instead")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse combinations of options that have no meaning."""
    if bool(options.model) == options.papers:
        parser.error("either MODEL or --papers is needed")
    needed = ["flops"] * bool(options.model)
    needed += ["bandwidth", "latency"] * (options.workers > 1)
    for name in needed:
        if options.model and getattr(options, name) is None:
            parser.error(f"--{name} is needed for {options.workers} workers")


if __name__ == "__main__":
    main()
