"""One page with plots of a training that `CurvatureLogger` has logged.

    python tools/report.py RUN [PAGE]

RUN is the directory of the callback, PAGE the HTML file to write (default:
report.html in RUN). The plots need Matplotlib.
"""

import argparse
import csv
import dataclasses
import html
import importlib.util
import io
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = {"step", "quantity", "layer", "value"}
# Layers are told apart by colour; more would not be.
LAYERS = 20
STYLE = (
    "body{font-family:sans-serif;max-width:72em;margin:2em auto;color:#222}"
    "svg{width:100%;height:auto}"
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity over the steps.

    Attributes:
        name: Whose it is, for the legend.
        steps: Where it is known.
        values: What it is there.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """A plot: its title, and which quantities it shows.

    Attributes:
        title: Its title.
        pattern: What the names of its quantities match.
        scale: That of its axis.
    """

    title: str
    pattern: str
    scale: str = "linear"


PANELS = (
    Panel("Loss", r"(val_)?loss", "log"),
    Panel("Metrics", r"(?!(val_)?loss$).*", "linear"),
    Panel("Step: clip factor, squared length", r"clip_factor|length", "log"),
    Panel("Step of the quadratic model", r"alpha(_plain)?|mu"),
    Panel("Reduction of the loss", r"(predicted|actual)_reduction", "symlog"),
    Panel("Damping", r"damping", "log"),
    Panel("Dampings tried in a step", r"tries"),
    Panel("Trace of a layer's block", r"trace", "log"),
    Panel("Condition of a layer's damped block", r"condition", "log"),
    Panel("Ritz values", r"ritz_value_\d+", "symlog"),
    Panel("Share of the time that a replica waits", r"idle_share_\d+"),
    Panel("Seconds of a step", r"seconds_per_step"),
    Panel("Renewed so far", r"(factor|inverse)_updates"),
    Panel("Skipped steps so far", r"skipped_steps"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    parser.add_argument("page", type=pathlib.Path, nargs="?", metavar="PAGE")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("Matplotlib is needed: pip install 'tfkfac[examples]'")
    try:
        curves = read(options.run)
    except ValueError as error:
        parser.error(str(error))
    page = options.page or options.run / "report.html"
    page.write_text(write(options.run.name, curves), encoding="utf-8")
    print(page)
    return 0


def read(run: pathlib.Path) -> dict[str, list[Curve]]:
    """The curves of each quantity, of all workers.

    Raises:
        ValueError: If there are none.
    """
    points: dict[tuple[str, str], dict[float, float]] = {}
    paths = sorted(run.glob("curvature*.csv"))
    for path in paths:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if not set(reader.fieldnames or ()) >= COLUMNS:
                raise ValueError(f"'{path}' is no file of `CurvatureLogger`.")
            for row in reader:
                # What all workers know comes from the first of them.
                known = points.setdefault((row["quantity"], row["layer"]), {})
                known.setdefault(float(row["step"]), float(row["value"]))
    if not points:
        raise ValueError(
            f"'{run}' must have what `CurvatureLogger(directory)` has written."
        )
    curves: dict[str, list[Curve]] = {}
    for (quantity, layer), values in points.items():
        curve = Curve(layer or quantity, list(values), list(values.values()))
        curves.setdefault(quantity, []).append(curve)
    return curves


def write(title: str, curves: dict[str, list[Curve]]) -> str:
    """The page."""
    left = set(curves)
    parts = []
    # "Metrics" are what no other plot has.
    for panel in sorted(PANELS, key=lambda panel: panel.title == "Metrics"):
        shown = sorted(n for n in left if re.fullmatch(panel.pattern, n))
        left -= set(shown)
        if shown:
            found = [curve for name in shown for curve in curves[name]]
            parts.append((PANELS.index(panel), draw(panel, found)))
    body = [svg for _, svg in sorted(parts)]
    name = html.escape(title)
    return (
        f"<!doctype html><meta charset=utf-8><title>{name}</title>"
        f"<style>{STYLE}</style><h1>{name}</h1>{''.join(body)}\n"
    )


def draw(panel: Panel, curves: Sequence[Curve]) -> str:
    """A plot of curves over the steps."""

    def fill(axes: "Axes") -> None:
        for curve in curves[:LAYERS]:
            axes.plot(curve.steps, curve.values, ".-", label=curve.name)
        left_out = len(curves) - LAYERS
        more = f" (the first {LAYERS} layers)" if left_out > 0 else ""
        axes.set(title=panel.title + more, xlabel="steps")
        values = [v for c in curves[:LAYERS] for v in c.values]
        if panel.scale != "log" or any(v > 0 for v in values):
            axes.set_yscale(panel.scale)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.grid(alpha=0.3)

    return as_svg(fill)


def as_svg(fill: Callable[["Axes"], None]) -> str:
    """A plot as a part of a page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    fill(figure.subplots())
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


if __name__ == "__main__":
    sys.exit(main())
