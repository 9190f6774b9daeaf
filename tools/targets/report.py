"""The table, and a file with all that was measured."""

import csv
import pathlib
import statistics
from collections.abc import Sequence

from targets.problems import PROBLEMS
from targets.results import QUANTITIES, Comparison, Row, geometric_means
from targets.study import Record

HEADINGS = (
    "method",
    "rate",
    "schedule",
    "final metric",
    "steps",
    "samples",
    "seconds",
    "CPU s",
    "x best",
    "first step CPU s",
    "claim",
)
RUN_COLUMNS = ("problem", "size", "data", "method", "rate", "length", "seed")
FOOTNOTE = """\
To the target, the final metric of the best baseline with the same seed: steps,
samples, seconds and processor seconds without evaluation and first step, means
and standard deviations over the seeds. "x best": processor seconds over those
of the best baseline. Each row has its best learning rate, K-FAC its default; *:
the best was the smallest or largest that was tried. Claim: against the baseline
that is there first, where (mean difference) * sqrt(n) is at least 3 standard
deviations of the difference; else "open"."""


def markdown(comparisons: Sequence[Comparison]) -> str:
    """All problems in one table, with what goes with it."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for comparison in comparisons:
        lines.append(f"| {_heading(comparison)} |" + " |" * len(HEADINGS[1:]))
        lines += [_line(row, comparison) for row in comparison.rows]
    means = [
        f"{method}, {length} schedule: geometric mean {ratio:.2f} of "
        f"{count} of {len(comparisons)} problems."
        for method, length, ratio, count in geometric_means(comparisons)
    ]
    return "\n".join([*lines, "", FOOTNOTE, *means])


def _heading(comparison: Comparison) -> str:
    metric = PROBLEMS[comparison.problem].metric
    seeds = len(comparison.seeds)
    text = (
        f"**{comparison.title}**: {metric}, target "
        f"{_spread(comparison.targets)}, {seeds} seed{'s' * (seeds > 1)}"
    )
    if comparison.incomplete:
        text += f"; {comparison.incomplete} settings without all seeds left out"
    return text


def _line(row: Row, comparison: Comparison) -> str:
    setting = row.setting
    cells = [
        setting.method,
        "" if setting.rate is None else f"{setting.rate:g}",
        setting.length,
        _spread(setting.finals),
        *_costs(row),
        _spread(row.ratio) or "-",
        _spread(setting.first_steps),
        row.verdict,
    ]
    if setting is comparison.best:
        cells[-1] = "best baseline"
    if setting.rate in comparison.edges.get(setting.method, ()):
        cells[1] += "*"
    return f"| {' | '.join(cells)} |"


def _costs(row: Row) -> list[str]:
    if not row.arrives:
        count = len(row.values("step"))
        return [f"{count} of {len(row.reached)} seeds", "-", "-", "-"]
    steps, samples = (
        f"{statistics.fmean(row.values(name)):,.0f}"
        for name in ("step", "samples")
    )
    seconds = (_spread(row.values(name)) for name in ("seconds", "cpu_seconds"))
    return [steps, samples, *seconds]


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation to three figures of the mean."""
    if not values:
        return ""
    text = f"{statistics.fmean(values):.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return text


def write_csv(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Writes a line for each evaluation."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*RUN_COLUMNS, *QUANTITIES, "metric"])
        for record in records:
            run = [record["run"][name] for name in RUN_COLUMNS]
            for point in record["curve"]:
                values = [point[name] for name in QUANTITIES]
                writer.writerow([*run, *values, point["metric"]])
