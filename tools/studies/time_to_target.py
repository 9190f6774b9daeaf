"""How long optimizers take until a model is as good as it gets with others.

    python tools/studies/time_to_target.py --size tiny  # 13 problems
    python tools/studies/time_to_target.py --problem mlp cnn --search-size small
    python tools/studies/time_to_target.py --optimizer my.py:make --problem mlp

The target is the final metric of the best baseline: SGD with momentum, Adam,
AdamW or Keras' Muon. Each has four learning rates, three batches and weight
decays of three effective sizes, chosen with training data that were held out;
K-FAC has its own rate, half or all of the epochs, and the same batches and
decays. All rates fall linearly to 0. Then what was chosen is trained with all
training data, and measured with the test set.

Tiny problems say how well a model is learnt: all rates, all seeds, and the
training loss at the end.

Each setting is a process of its own, in Keras' `fit`, on one thread. Look at
processor seconds: the others depend on what else the machine does. A study can
be continued: what is in the file of --json is not done again.
"""

import argparse
import pathlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from command import positive
from targets import report, study
from targets.methods import BASELINES, KFAC, outside, parse
from targets.plan import Plan
from targets.problems import SIZES, TINY, problems_of
from targets.run import Run

METHODS = {
    TINY: ("adam", "muon", report.NATURAL, "kfac:step=spectral:rest=adam"),
    "full": (*BASELINES, "kfac:step=natural", "kfac:step=spectral"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a training has failed, else 0."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(words)
    records = study.Records(options.json, words)
    records.forget(options.again)
    failures: list[str] = []
    lock = threading.Lock()

    def note(run: Run, result: Mapping[str, Any]) -> None:
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
            missing, options.data, options.files, options.jobs, note
        )
    print("\n" + "\n\n".join(report.sections(records)))
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


def make_plan(options: argparse.Namespace) -> Plan:
    """What the options ask for, without what cannot be run here."""
    problems = {}
    for name, problem in problems_of(options.size).items():
        if name not in (options.problem or problems_of(options.size)):
            continue
        if problem.is_here:
            problems[name] = study.data_name(problem.data, options.data)
        else:
            print(f"Left out: {name}, which needs {problem.needs}")
    grid = {
        name: getattr(options, name)
        for name in ("rates", "decays", "batches", "shares")
        if getattr(options, name) is not None
    }
    usual = METHODS[TINY if options.size == TINY else "full"]
    methods = [*options.method, *options.files]
    return Plan(
        options.size,
        options.search_size or options.size,
        problems,
        methods or usual,
        options.seeds or range(3 if options.size == TINY else 5),
        options.search_seeds,
        grid,
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="A method is NAME[:KEY=VALUE...] with arguments of its "
        f"constructor; names: {', '.join((*BASELINES, KFAC))}. Of kfac, "
        "rest=adam makes Adam, with the rate that was best for it, the rest "
        "optimizer.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_study(parser.add_argument_group("what is trained"))
    add_grid(parser.add_argument_group("what is tried of each method"))
    add_process(parser.add_argument_group("how it is run"))
    options = parser.parse_args(arguments)
    options.data = dict(options.data)
    options.files = dict(options.optimizer)
    known = problems_of(options.size)
    if unknown := set(options.problem) - set(known):
        parser.error(
            f"--problem must be of {', '.join(known)}; received "
            f"{', '.join(sorted(unknown))}"
        )
    if options.size == TINY and options.search_size:
        parser.error("--search-size: tiny problems are not searched")
    return options


def add_study(group: argparse._ArgumentGroup) -> None:
    """Adds what is trained."""
    group.add_argument("--size", choices=SIZES, default="full")
    group.add_argument(
        "--search-size",
        choices=("full", "small"),
        help="size of the models and data that settings are searched with: "
        "small has a quarter of the weights and half of the examples "
        "(default: that of --size)",
    )
    group.add_argument(
        "--problem", nargs="+", default=[], help="default: all of the size"
    )
    group.add_argument(
        "--method",
        nargs="+",
        type=method,
        default=[],
        metavar="METHOD",
        help=f"default: {' '.join(METHODS['full'])}; of tiny problems "
        f"{' '.join(METHODS[TINY])}",
    )
    group.add_argument(
        "--optimizer",
        nargs="+",
        type=file_optimizer,
        default=[],
        metavar="FILE:FUNCTION",
        help="optimizers that the function makes, from a learning_rate (a "
        "schedule) and a weight_decay (that of Keras, or None); it has Adam's "
        "rates unless there are --rates",
    )
    group.add_argument(
        "--data",
        nargs="+",
        type=directory,
        default=[],
        metavar="NAME=DIR",
        help="directories of the idx files of mnist and fashion_mnist; digits "
        "of scikit-learn stand in",
    )


def add_grid(group: argparse._ArgumentGroup) -> None:
    """Adds what is tried of each method."""
    group.add_argument(
        "--rates",
        nargs="+",
        type=number,
        metavar="RATE",
        help="learning rates of all but K-FAC (default: four of each problem "
        "and method)",
    )
    group.add_argument(
        "--batches",
        nargs="+",
        type=positive,
        metavar="N",
        help="default: three of each problem, one if it is tiny",
    )
    group.add_argument(
        "--decays",
        nargs="+",
        type=number,
        metavar="PART",
        help="what weight decay takes away over a training; all but the first "
        "are tried with what was best with it (default: 0 0.05 0.25)",
    )
    group.add_argument(
        "--shares",
        nargs="+",
        type=number,
        metavar="PART",
        help="lengths of the schedule over the problem's epochs (default: 1, "
        "for K-FAC 0.5 and 1)",
    )
    group.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        metavar="N",
        help="default: 0 to 4; of tiny problems 0 to 2",
    )
    group.add_argument(
        "--search-seeds", nargs="+", type=int, metavar="N", default=[0]
    )


def add_process(group: argparse._ArgumentGroup) -> None:
    """Adds how it is run."""
    group.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="processes at a time (default: %(default)s)",
    )
    group.add_argument(
        "--json",
        type=pathlib.Path,
        default=study.TRAININGS,
        metavar="FILE",
        help="keeps all results; those it has are not measured again (default: "
        "docs/trainings.json)",
    )
    group.add_argument(
        "--again",
        nargs="+",
        type=method,
        default=[],
        metavar="METHOD",
        help="measures these methods again",
    )


def method(text: str) -> str:
    """Checks a method."""
    return parse(text).text


def file_optimizer(text: str) -> tuple[str, str]:
    """Checks FILE:FUNCTION."""
    return outside(text)


def number(text: str) -> float:
    """Parses a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 0; received {text!r}"
        )
    return value


def directory(text: str) -> tuple[str, pathlib.Path]:
    """Parses NAME=DIR."""
    name, equals, path = text.partition("=")
    known = name in ("mnist", "fashion_mnist")
    if not known or not equals or not pathlib.Path(path).is_dir():
        raise argparse.ArgumentTypeError(
            "must be mnist or fashion_mnist, = and a directory; received "
            f"{text!r}"
        )
    return name, pathlib.Path(path).resolve()


if __name__ == "__main__":
    sys.exit(main())
