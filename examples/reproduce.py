"""Reproduces an experiment of a paper: a table, a CSV file and a plot.

    python examples/reproduce.py --list
    python examples/reproduce.py distributed-kfac-table-1 --quick --jobs 4

With --quick it is small models and little data, minutes on four cores. Without
it the data are the paper's, as far as one machine can train them: what needs
more is said.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from common.argument_types import positive_int
from experiments import EXPERIMENTS, output
from experiments.experiment import Case, Experiment
from experiments.running import FailedError, run_all


def main(command_line: Sequence[str] | None = None) -> None:
    options = parse(command_line)
    experiment = EXPERIMENTS[options.experiment]
    try:
        rows = run(experiment, options)
        print(f"Not run here: {experiment.elsewhere}")
    except FailedError as error:
        sys.exit(f"{options.experiment}: a training has failed:\n{error}")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / options.experiment
    output.write_csv(path.with_suffix(".csv"), rows)
    output.save_plot(path.with_suffix(".png"), experiment, rows)
    print(f"\nWritten: {path}.csv, {path}.png")


def run(
    experiment: Experiment, options: argparse.Namespace
) -> list[output.Row]:
    """Runs an experiment and prints its table, whose rows it returns."""
    print(f"{experiment.source}\n{experiment.question}\n")
    cases = experiment.cases(options.quick)
    results = run_all(
        [experiment.task(case, options.quick) for case in cases],
        options.jobs,
        lambda number: print(f"done: {described(cases[number])}", flush=True),
    )
    rows = output.rows_of(experiment, cases, results)
    print(f"\n{output.table(rows)}\n")
    return rows


def described(case: Case) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def parse(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", metavar="EXPERIMENT", choices=EXPERIMENTS)
    parser.add_argument(
        "--list",
        action=Names,
        nargs=0,
        help="prints the names of the experiments, and ends",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="trainings at a time, each with one thread for each of its "
        "workers (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("reproduced"),
        metavar="DIR",
        help="where the CSV file and the plot go (default: %(default)s)",
    )
    return parser.parse_args(command_line)


class Names(argparse.Action):
    """Prints the names of the experiments, and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        print("\n".join(EXPERIMENTS))
        parser.exit()


if __name__ == "__main__":
    main()
