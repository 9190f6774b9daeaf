"""Plots of what was measured; only they need Matplotlib."""

import pathlib
from collections.abc import Sequence

from benchmarks.measurement import Row


def save_steps(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Plots each model's steps over an interval of the first mix."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.get("mixes")]
    models = list(dict.fromkeys(row["model"] for row in timed))
    figure = Figure(figsize=(5 * len(models), 4), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for row in timed:
            if row["model"] == model:
                mix, cost = next(iter(row["mixes"].items()))
                axes.plot(cost["phases_ms"], label=row["variant"], linewidth=1)
        axes.set(
            title=f"{model} at {mix}",
            xlabel="step of the interval",
            ylabel="milliseconds",
            yscale="log",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
