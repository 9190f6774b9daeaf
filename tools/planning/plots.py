"""A plot of a plan; only it needs Matplotlib."""

import pathlib
from collections.abc import Sequence

from planning.cost import Estimate


def save_plan(
    path: pathlib.Path,
    estimates: Sequence[Estimate],
    intervals: tuple[int, int],
) -> None:
    """Plots the mean step over the curvature state of all distributions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    solvers = dict.fromkeys(one.candidate.solver for one in estimates)
    for solver in solvers:
        same = [one for one in estimates if one.candidate.solver == solver]
        points = [
            (one.state["total"] / 2**20, 1e3 * one.amortised(*intervals))
            for one in same
        ]
        axes.scatter(*zip(*points, strict=True), label=solver)
        for one, point in zip(same, points, strict=True):
            axes.annotate(
                one.candidate.text,
                point,
                xytext=(4, 4),
                textcoords="offset points",
                fontsize="x-small",
            )
    factor, inverse = intervals
    axes.set(
        xlabel="curvature state of a worker (MB)",
        ylabel=f"mean step at intervals {factor} and {inverse} (ms)",
        xscale="log",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
