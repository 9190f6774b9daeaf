"""How long optimizers take until a model is as good as it gets with others.

    python tools/time_to_target.py --quick            # small twins, minutes
    python tools/time_to_target.py --small --json study.json
    python tools/time_to_target.py --problem autoencoder --data mnist=DIR
    python tools/time_to_target.py --problem mlp --small --method adam kfac

The target is the final metric of the best baseline: SGD with momentum, Adam,
AdamW or Muon, each with four learning rates. All rates decay linearly to 0,
over schedules of full and half length. K-FAC has its defaults and the guide's
schedule: half of the baselines' epochs (two thirds for the CNN, a quarter for
autoencoders), in larger batches; `kfac-quadratic` has the same and no learning
rate. Each training is a process of its own, in Keras' `fit`. Look at processor
seconds: the others depend on what else the machine does.

A study can be continued: what is in the file of --json is not done again.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Sequence

from benchmarks.command import positive
from targets import plots, report, study
from targets.problems import BASELINES, KFACS, LENGTHS, METHODS, PROBLEMS
from targets.results import best_rates, compare
from targets.run import Run, parse_method, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a training has failed, else 0."""
    options = parse_arguments(arguments)
    runs = planned(options)
    again = {run for run in runs if run.method in options.again}
    records = [
        record
        for record in study.load(options.json)
        if Run(**record["run"]) not in again
    ]
    failures: list[str] = []

    def note(run: Run, record: study.Record) -> None:
        records.append(record)
        last = record["curve"][-1]
        print(
            f"{run}: {last['metric']:.5g} in {last['cpu_seconds']:.1f} "
            f"processor seconds ({len(missing)} trainings)",
            flush=True,
        )
        if options.json:
            study.save(options.json, records)

    for stage in stages(runs, records, options):
        missing = study.missing(stage, records)
        failures += study.train_all(missing, options.data, options.jobs, note)
    show(options, records)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


def planned(options: argparse.Namespace) -> list[Run]:
    """All trainings that the options ask for."""
    return [
        run
        for problem in options.problem
        for run in plan(
            problem,
            "small" if options.small else "full",
            study.data_name(problem, options.data),
            options.method,
            options.length,
            options.seeds,
            options.threads,
            options.rates,
            options.quick,
        )
    ]


def stages(
    runs: Sequence[Run],
    records: Sequence[study.Record],
    options: argparse.Namespace,
) -> Iterator[Sequence[Run]]:
    """Yields what is trained one after the other.

    With `--search-once` all learning rates with the first seed, then with the
    others those that were best. Otherwise all at once.
    """
    if not options.search_once:
        yield runs
        return
    first = [run for run in runs if run.seed == options.seeds[0]]
    yield first
    yield [
        dataclasses.replace(run, seed=seed)
        for run in best_rates(first, records)
        for seed in options.seeds[1:]
    ]


def show(options: argparse.Namespace, records: Sequence[study.Record]) -> None:
    """Writes all that the options ask for."""
    compared = [
        record
        for record in records
        if record["run"]["method"] not in options.without
    ]
    comparisons = list(compare(compared))
    print(f"\n{report.markdown(comparisons)}")
    if options.csv:
        report.write_csv(options.csv, records)
    if options.plot:
        plots.save(options.plot, comparisons)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="A method is NAME[@FOLDER][:KEY=VALUE...]: its name, the folder "
        "that its library is imported from, and arguments of its constructor. "
        f"Names: {', '.join(METHODS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_study(parser.add_argument_group("what is trained"))
    add_process(parser.add_argument_group("how it is run"))
    add_output(parser.add_argument_group("output"))
    options = parser.parse_args(arguments)
    options.data = dict(options.data)
    options.small |= options.quick
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    options.method = options.method or [
        name
        for name in (*BASELINES, *KFACS)
        if not (options.quick and name == "muon")
    ]
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs Matplotlib: pip install 'tfkfac[examples]'")
    return options


def add_study(group: argparse._ArgumentGroup) -> None:
    """Adds what is trained."""
    group.add_argument(
        "--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS)
    )
    group.add_argument(
        "--method",
        nargs="+",
        type=method,
        metavar="METHOD",
        help=f"default: {' '.join((*BASELINES, *KFACS))}",
    )
    group.add_argument(
        "--rates",
        nargs="+",
        type=rate,
        metavar="RATE",
        help="learning rates of all but K-FAC (default: four of each problem "
        "and method)",
    )
    group.add_argument(
        "--length",
        nargs="+",
        choices=LENGTHS,
        default=["full", "half"],
        help="lengths of the schedules (default: full half)",
    )
    group.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="default: 0 1 2"
    )
    group.add_argument(
        "--search-once",
        action="store_true",
        help="all learning rates with the first seed only, of each method and "
        "length the best of them with the others",
    )
    group.add_argument(
        "--small",
        action="store_true",
        help="twins with a quarter of the weights and half of the examples",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="small twins, one seed, two rates, no muon: its steps take long",
    )
    group.add_argument(
        "--data",
        nargs="+",
        type=directory,
        default=[],
        metavar="NAME=DIR",
        help="directories of the idx files of mnist (the autoencoder's) and "
        "fashion_mnist (the classifiers'); digits of scikit-learn stand in",
    )


def add_process(group: argparse._ArgumentGroup) -> None:
    """Adds how it is run."""
    for name, text in (
        ("threads", "those of a process"),
        ("jobs", "processes at a time"),
    ):
        group.add_argument(
            f"--{name}",
            type=positive,
            default=1,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )


def add_output(group: argparse._ArgumentGroup) -> None:
    """Adds where results go."""
    group.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="keeps all results; those it has are not measured again",
    )
    group.add_argument(
        "--again",
        nargs="+",
        type=method,
        default=[],
        metavar="METHOD",
        help="measures these methods again",
    )
    group.add_argument(
        "--without",
        nargs="+",
        type=method,
        default=[],
        metavar="METHOD",
        help="leaves methods of the file out of the table",
    )
    group.add_argument("--csv", type=pathlib.Path, metavar="FILE")
    group.add_argument("--plot", type=pathlib.Path, metavar="FILE")


def method(text: str) -> str:
    """Checks a method."""
    return parse_method(text).text


def rate(text: str) -> float:
    """Parses a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a number above 0; received {text!r}"
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
