"""Charts of the trainings at full size."""

import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from command import save_chart
from targets.methods import KFAC
from targets.problems import FULL_PROBLEMS
from targets.report import title
from targets.results import mean_curve, settings_of
from targets.run import FINAL, Run
from targets.study import Record

# Setting, and points of time and loss, by problem and method.
Curves = dict[tuple[str, str], tuple[Run, Sequence[tuple[float, float]]]]

ALL = KFAC, "muon", "adam"
STEPS = KFAC, f"{KFAC}:step=natural", "adam"


def draw_seconds(records: Iterable[Record], path: pathlib.Path) -> None:
    """Draw the mean curves of trainings of equal processor seconds."""
    curves: Curves = {}
    # The settings of a method end with that of equal seconds, if there is one.
    groups = settings_of(r for r in records if r["run"]["phase"] == FINAL)
    for run in sorted(groups, key=lambda run: run.share != 1):
        curves[run.problem, run.method] = run, mean_curve(run, groups[run])
    _draw(curves, ALL, "processor seconds", path)


def draw_epochs(records: Iterable[Record], path: pathlib.Path) -> None:
    """Draw the mean curves over the epochs of trainings at full size."""
    curves: Curves = {}
    final = (r for r in records if r["run"]["phase"] == FINAL)
    for run, group in settings_of(final).items():
        if run.size == "full":
            losses = [loss for _, loss in mean_curve(run, group)]
            end = run.row.epochs * run.share
            epochs = np.linspace(0, end, len(losses) + 1)[1:]
            pairs = list(zip(epochs, losses, strict=True))
            curves[run.problem, run.method] = run, pairs
    _draw(curves, STEPS, "epochs", path)


def _draw(
    curves: Curves, methods: Sequence[str], label: str, path: pathlib.Path
) -> None:
    """Draw a panel for each problem, with a line for each method."""
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(2, 4, figsize=(12, 6))
    for axis, name in zip(axes.flat, FULL_PROBLEMS, strict=True):
        axis.set_visible(any((name, method) in curves for method in methods))
        for method in methods:
            if (name, method) in curves:
                run, points = curves[name, method]
                text = title(run.method).strip("`")
                axis.semilogy(*np.transpose(points), label=text)
        row = FULL_PROBLEMS[name]
        metric = "error" if row.higher_is_better else row.metric
        axis.set_title(f"{name}: {metric}", fontsize=9)
        axis.tick_params(labelsize=8, which="both")
        axis.yaxis.set_minor_formatter(ticker.LogFormatter())
    for axis in axes[1]:
        axis.set_xlabel(label)
    axes[0][0].legend(frameon=False)
    save_chart(figure, path)
