"""Plots of the metric; only they need Matplotlib."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from targets.problems import PROBLEMS
from targets.results import QUANTITIES, Comparison, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = ("steps", "samples", "seconds", "processor seconds")
STYLES = {"double": ":", "full": "-", "half": "--"}


def save(path: pathlib.Path, comparisons: Sequence[Comparison]) -> None:
    """Plots each problem's metric against steps, samples and seconds."""
    from matplotlib.figure import Figure

    rows, columns = len(comparisons), len(QUANTITIES)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for comparison, line in zip(comparisons, panels, strict=True):
        methods = dict.fromkeys(row.setting.method for row in comparison.rows)
        for axes, quantity, label in zip(line, QUANTITIES, LABELS, strict=True):
            for row in comparison.rows:
                number = list(methods).index(row.setting.method)
                _draw(axes, row, quantity, f"C{number}")
            for target in comparison.targets:
                axes.axhline(target, color="gray", linewidth=0.6)
            axes.set(xlabel=label)
            axes.grid(alpha=0.3)
        problem = PROBLEMS[comparison.problem]
        if not problem.higher_is_better:
            line[0].set(yscale="log")
        line[0].set(title=comparison.title, ylabel=problem.metric)
        line[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw(axes: "Axes", row: Row, quantity: str, color: str) -> None:
    """Draws a line for each seed."""
    setting = row.setting
    label: str | None = f"{setting.method}, {setting.length}"
    for curve in setting.curves.values():
        axes.plot(
            [point[quantity] for point in curve],
            [point["metric"] for point in curve],
            STYLES[setting.length],
            color=color,
            linewidth=1,
            label=label,
        )
        label = None
