"""Charts of the trainings at full size."""

import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from command import save_chart
from targets.methods import KFAC
from targets.problems import FULL_PROBLEMS
from targets.report import title
from targets.results import mean_curve, of_one_command, settings_of
from targets.run import FINAL, Run
from targets.study import Record

TIMED = KFAC, "muon", "adam"
STEPS = KFAC, f"{KFAC}:step=natural", "adam"


def draw(
    records: Iterable[Record],
    methods: Sequence[str],
    path: pathlib.Path,
    *,
    over_epochs: bool,
) -> None:
    """Draw the mean curves of the methods, a panel for each problem."""
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(2, 4, figsize=(12, 6))
    group = [r for r in records if _is_drawn(Run(**r["run"]), methods)]
    for axis, name in zip(axes.flat, FULL_PROBLEMS, strict=True):
        found = [r for r in group if r["run"]["problem"] == name]
        if not over_epochs:
            found = of_one_command(found, methods)
        settings = settings_of(found)
        for run in sorted(settings, key=lambda r: methods.index(r.method)):
            times, losses = np.transpose(mean_curve(run, settings[run]))
            if over_epochs:
                epochs = run.row.epochs * run.share
                times = np.linspace(0, epochs, len(losses) + 1)[1:]
            axis.semilogy(times, losses, label=title(run.method).strip("`"))
        row = run.row
        metric = "error" if row.higher_is_better else row.metric
        axis.set_title(f"{name}: {metric}", fontsize=9)
        axis.tick_params(labelsize=8, which="both")
        axis.yaxis.set_minor_formatter(ticker.LogFormatter())
    for axis in axes[1]:
        axis.set_xlabel("epochs" if over_epochs else "processor seconds")
    axes[0][0].legend(frameon=False)
    save_chart(figure, path)


def _is_drawn(run: Run, methods: Sequence[str]) -> bool:
    return (run.phase, run.size) == (FINAL, "full") and run.method in methods
