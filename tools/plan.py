r"""Says what K-FAC would cost on a cluster, before anything is trained.

    python tools/plan.py ResNet50 --workers 64 --batch 32 \
        --bandwidth 100Gbit --latency 5us --flops 14T
    python tools/plan.py MobileNetV2 --image-size 96 --measure
    python tools/plan.py ResNet50 --flops 14T --plot plan.png \
        --kfac max_factor_dim=null
    python tools/plan.py --papers        # DP-KFAC's and KAISA's figures
    python tools/plan.py --verify        # against steps of this machine

For every distribution and solver: seconds of a plain step, of one that updates
the factors and of the longest that decomposes, the mean step at some intervals,
what a worker receives in each kind of step, and its curvature state. All
numbers are those of the worker that has most.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.command import positive
from planning import report, units

_MODELS = "a model of keras.applications, or InceptionV4"
_INTERVALS = [(10, 100), (1, 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check(parser, options)
    if options.papers:
        from planning import papers

        print(report.papers_text(papers.reproduce(), papers.STALE))
        return
    if options.verify is not None:
        from planning import local

        models = options.verify or ["M1", "M2", "M3", "M4"]
        print(report.verify_text(local.verify(models, options.rounds)))
        return
    plan(parser, options)


def plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Compares the distributions of a model."""
    import tfkfac
    from planning import models

    try:
        # An optimizer does not keep its model.
        model = models.build(options.model, options.image_size)
        optimizer = tfkfac.KFAC(**dict(options.kfac)).attach(model)
        machine, first_order = models.machine(options, model)
        estimates = models.compare(options, optimizer, machine, first_order)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(report.machine_text(machine, first_order))
    print(report.counts_text(optimizer))
    print(report.plan_text(estimates, options.intervals))
    if options.plot:
        from planning import plots

        plots.save_plan(options.plot, estimates, options.intervals[0])


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=_MODELS)
    add("--workers", type=positive, default=1, metavar="N")
    add(
        "--batch",
        type=positive,
        default=32,
        metavar="N",
        help="examples of a worker (default: 32)",
    )
    add("--image-size", type=positive, metavar="PIXELS")
    add("--flops", type=units.flops, help="of products of matrices, as 14T")
    add(
        "--bandwidth",
        type=units.bandwidth,
        help="that a worker receives, as 100Gbit or 12.5GB",
    )
    add("--latency", type=units.latency, help="of a message, as 5us")
    add(
        "--measure",
        action="store_true",
        help="time products, decompositions and a step of this machine",
    )
    add(
        "--intervals",
        nargs="+",
        type=units.intervals,
        default=_INTERVALS,
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
        type=argument,
        default=[],
        metavar="KEY=VALUE",
        help="arguments of KFAC, values in JSON",
    )
    add("--plot", type=pathlib.Path, metavar="FILE")
    add("--papers", action="store_true", help="the papers' figures, instead")
    add("--verify", nargs="*", metavar="MODEL", help="M1 to M4, instead")
    add("--rounds", type=positive, default=3, metavar="N", help="of --verify")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what does not go together."""
    chosen = [
        name
        for name, wanted in (
            ("MODEL", options.model),
            ("--papers", options.papers),
            ("--verify", options.verify is not None),
        )
        if wanted
    ]
    if len(chosen) != 1:
        parser.error(
            f"one of MODEL, --papers and --verify is needed; got {chosen}"
        )
    if not options.model:
        return
    between = options.workers > 1
    if options.measure and options.flops:
        parser.error("--flops is measured by --measure")
    if not options.measure and options.flops is None:
        parser.error("--flops or --measure is needed")
    for name in ("bandwidth", "latency"):
        if between and getattr(options, name) is None:
            parser.error(f"--{name} is needed for several workers")


def argument(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE."""
    key, found, value = text.partition("=")
    if not found or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value  # a word needs no quotes


if __name__ == "__main__":
    main()
