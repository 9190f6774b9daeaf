"""Reproduce an experiment of a paper: print a table, write a CSV file.

    python examples/reproduce.py --list
    python examples/reproduce.py distributed-kfac-table-1 --quick --jobs 4

With --quick models and data are small: minutes on four cores. Without --quick
the data are those of the paper, if one machine can train them.
"""

import argparse
import concurrent.futures
import csv
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments import EXPERIMENTS
from experiments.running import MEASURES


def main(command_line: Sequence[str] | None = None) -> None:
    options = parse(command_line)
    if options.list:
        print("\n".join(EXPERIMENTS))
        return
    experiment = EXPERIMENTS[options.experiment]
    print(f"{experiment.source}\n{experiment.question}\n")
    cases = experiment.cases(options.quick)
    trainings = [experiment.training(case, options.quick) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as executor:
        results = list(executor.map(lambda task: task.run(), trainings))
    rows: list[dict[str, Any]] = [
        dict(case) | {n: MEASURES[n](result) for n in experiment.measures}
        for case, result in zip(cases, results, strict=True)
    ]
    for row in ([*rows[0]], *(row.values() for row in rows)):
        print("  ".join(_text(value).ljust(22) for value in row).rstrip())
    print(f"\nNot run here: {experiment.elsewhere}")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.experiment}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    print(f"Written: {path}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("experiment", nargs="?", metavar="EXPERIMENT", choices=EXPERIMENTS)
    add("--list", action="store_true", help="print all names")
    add("--quick", action="store_true")
    add("--jobs", type=int, default=1, help="trainings at a time")
    add("--output", type=pathlib.Path, default=pathlib.Path("reproduced"))
    options = parser.parse_args(command_line)
    if not options.list and options.experiment is None:
        parser.error("EXPERIMENT or --list is required")
    return options


if __name__ == "__main__":
    main()
