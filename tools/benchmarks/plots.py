"""Plots of what was measured; only they need Matplotlib."""

import pathlib
from collections.abc import Sequence
from typing import Any

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


def save_growth(path: pathlib.Path, growth: Sequence[dict[str, Any]]) -> None:
    """Plots seconds above and bytes below, an axis of the sweep a column."""
    from matplotlib.figure import Figure

    axes_names = list(dict.fromkeys(line["axis"] for line in growth))
    figure = Figure(figsize=(5 * len(axes_names), 8), layout="constrained")
    panels = figure.subplots(2, len(axes_names), squeeze=False)
    for column, name in enumerate(axes_names):
        for line in growth:
            if line["axis"] != name or line["exponent"] is None:
                continue
            is_time = line["quantity"].endswith("step")
            panels[0 if is_time else 1, column].plot(
                line["sizes"],
                line["values"],
                marker="o",
                label=f"{line['quantity']}, exponent {line['exponent']:.2f}",
            )
        for row, unit in enumerate(("seconds", "bytes")):
            panels[row, column].set(
                xlabel=name, ylabel=unit, xscale="log", yscale="log"
            )
            panels[row, column].grid(alpha=0.3)
            panels[row, column].legend(fontsize="small")
    figure.savefig(path, dpi=150)
