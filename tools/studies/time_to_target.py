r"""Measure how long optimizers take to the best result of the baselines.

    python tools/studies/time_to_target.py --size tiny  # 13 problems
    python tools/studies/time_to_target.py --problem mlp cnn --search-size small
    python tools/studies/time_to_target.py --problem mlp \
        --optimizer tools/studies/other_optimizers.py:soap

The target is the final metric of the best baseline: SGD with momentum, Adam,
AdamW or Keras' Muon. Settings are chosen on held-out training data: each
baseline has four learning rates, three batches and weight decays of three
effective sizes; K-FAC has its default rate, half or all of the epochs, and the
same batches and decays; `KFAC()` has Adam's batch and epochs. All rates fall
linearly to 0. The chosen settings are trained with all training data and
measured with the test set.

Tiny problems compare the final training loss: all rates, all seeds.

Each setting is a process, in Keras' `fit`, on one thread. Compare processor
seconds: wall seconds depend on the load of the machine. A study can be
continued: trainings in the file of --json are not repeated.
"""

import argparse
import pathlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from targets import report, study  # isort: skip, sets the module path
from common.arguments import make_parser_of, positive
from targets.equal import EqualSeconds, known_settings
from targets.methods import BASELINES, KFAC, outside, parse
from targets.plan import Plan
from targets.problems import SIZES, TINY, problems_of
from targets.run import Run

METHODS = {
    TINY: ("adam", "muon", report.NATURAL, "kfac"),
    "full": (*BASELINES, "kfac:step=natural", "kfac"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a training has failed, else 0."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(words)
    records = study.Records(options.json, words)
    failures: list[str] = []
    lock = threading.Lock()

    def add(run: Run, result: Mapping[str, Any]) -> None:
        with lock:
            records.add(run, result)
        curve = result["curve"]
        print(
            f"{run.phase} {run}: {curve['metric'][-1]} after "
            f"{curve['cpu_seconds'][-1]} processor seconds",
            flush=True,
        )

    plan = make_plan(options)
    for stage in plan.stages(records.runs):
        missing = records.missing(stage)
        if missing:
            print(f"{len(missing)} trainings", flush=True)
        failures += study.train_all(
            missing, options.data, options.files, options.jobs, add
        )
    if options.equal_seconds:
        pairs = list(report.equal_seconds(records.runs))
        print("\n" + report.markdown_table(*report.equal_table(pairs)))
    else:
        print("\n" + "\n\n".join(report.sections(records)))
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


def make_plan(options: argparse.Namespace) -> Plan | EqualSeconds:
    """Return the plan of the options, without problems that cannot be run."""
    problems = {}
    for name, problem in problems_of(options.size).items():
        if options.problem and name not in options.problem:
            continue
        if problem.is_installed:
            problems[name] = study.data_name(problem.data, options.data)
        else:
            print(f"Left out: {name}, which needs {problem.needs}")
    if options.equal_seconds:
        methods = options.method or ("adam", "muon", "kfac")
        settings = sorted(
            known_settings(problems, methods),
            key=lambda run: [*problems].index(run.problem),
        )
        return EqualSeconds(settings, options.seeds or (5, 6, 7))
    names = "rates", "decays", "batches", "shares"
    grid = {n: value for n in names if (value := getattr(options, n))}
    tiny = options.size == TINY
    return Plan(
        options.size,
        options.search_size or options.size,
        problems,
        [*options.method, *options.files] or METHODS[TINY if tiny else "full"],
        options.seeds or range(3 if tiny else 5),
        grid,
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = make_parser_of(
        __doc__,
        "A method is NAME[:KEY=VALUE...] with arguments of its "
        f"constructor; names: {', '.join((*BASELINES, KFAC))}. Of kfac, "
        "rest=adam makes the rest optimizer an Adam with its best rate.",
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="full")
    add(
        "--search-size",
        choices=("full", "small"),
        help="size at which settings are searched; small has a quarter of the "
        "weights and half of the examples (default: that of --size)",
    )
    add("--problem", nargs="+", default=[], help="default: all of the size")
    add(
        "--equal-seconds",
        action="store_true",
        help="train the baselines for the processor seconds of KFAC(), too, "
        "with the settings of docs/trainings.json",
    )
    for name, convert, metavar, text in (
        ("method", method, "METHOD", "optimizers (default: see README.md)"),
        (
            "optimizer",
            outside,
            "FILE:FUNCTION",
            "functions of learning_rate (a schedule) and weight_decay (or "
            "None) that return an optimizer; tried with Adam's rates",
        ),
        ("data", directory, "NAME=DIR", "idx files of mnist, fashion_mnist"),
    ):
        add(
            f"--{name}",
            nargs="+",
            type=convert,
            default=[],
            metavar=metavar,
            help=text,
        )
    for name, parse_value, text in (
        ("rates", number, "learning rates of all but K-FAC"),
        ("batches", positive, "examples of a batch"),
        ("decays", number, "fractions of the weights that decay removes"),
        ("shares", number, "lengths of the schedule, all epochs = 1"),
        ("seeds", int, "seeds of the final trainings"),
    ):
        add(f"--{name}", nargs="+", type=parse_value, metavar="X", help=text)
    add("--jobs", type=positive, default=1, metavar="N", help="processes")
    add(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="all results (default: docs/trainings.json, with --equal-seconds "
        "docs/equal_seconds.json)",
    )
    options = parser.parse_args(arguments)
    default = study.EQUAL_SECONDS if options.equal_seconds else study.TRAININGS
    options.json = options.json or default
    options.data, options.files = dict(options.data), dict(options.optimizer)
    known = problems_of(options.size)
    if unknown := set(options.problem) - set(known):
        parser.error(
            f"--problem must be of {', '.join(known)}; received "
            f"{', '.join(sorted(unknown))}"
        )
    if options.size == TINY and options.search_size:
        parser.error("--search-size: tiny problems are not searched")
    return options


def method(text: str) -> str:
    """Check a method."""
    return parse(text).text


def number(text: str) -> float:
    """Parse a number that is not negative."""
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 0; received {text!r}"
        )
    return value


def directory(text: str) -> tuple[str, pathlib.Path]:
    """Parse NAME=DIR."""
    name, _, path = text.partition("=")
    known = name in ("mnist", "fashion_mnist")
    if not known or not path or not pathlib.Path(path).is_dir():
        raise argparse.ArgumentTypeError(
            "must be mnist or fashion_mnist, = and a directory; received "
            f"{text!r}"
        )
    return name, pathlib.Path(path).resolve()


if __name__ == "__main__":
    sys.exit(main())
