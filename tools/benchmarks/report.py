"""Tables of what was measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measurement import Row
from benchmarks.variants import parse
from targets.report import markdown_table

MEGABYTE = 1e6


def text_table(rows: Sequence[Row]) -> str:
    """A line for each variant on each model."""
    mixes = _mixes(rows)
    header = ["model", "variant"]
    for mix in mixes:
        header += [f"{mix} ms", "x SGD", "x CPU", "long/med"]
    header += ["first s", "CPU s", "x CPU", "peak MB", "over SGD", "state MB"]
    lines = [header]
    for row in rows:
        line = [row["model"], row["variant"]]
        if "first_step" not in row:
            lines.append([*line, *["-"] * (len(header) - 2)])
            continue
        for mix in mixes:
            line += _step_cells(row, mix)
        first = row["first_step"]
        line += [
            f"{first['seconds']:.1f}",
            f"{first['cpu_seconds']:.1f}",
            _number(row.get("first_step_cpu_ratio"), ".1f"),
            _megabytes(row.get("peak_bytes")),
            _megabytes(row.get("extra_peak_bytes")),
            _megabytes(row.get("state_bytes")),
        ]
        lines.append(line)
    return _align(lines)


def _step_cells(row: Row, mix: str) -> list[str]:
    cost = row.get("mixes", {}).get(mix)
    if cost is None:
        return ["-"] * 4
    return [
        f"{cost['mean_ms']:.2f}",
        _number(cost.get("ratio"), ".2f"),
        _number(cost.get("cpu_ratio"), ".2f"),
        f"{_longest(cost):.1f}",
    ]


def kinds_table(rows: Sequence[Row]) -> str:
    """Medians of K-FAC's kinds of step at each mix, in milliseconds."""
    kinds = ("plain", "factor", "inverse")
    lines = [["model", "variant", "intervals", *kinds]]
    for row in rows:
        if not parse(row["variant"]).is_kfac:
            continue
        for mix, cost in row.get("mixes", {}).items():
            cells = (_number(cost["kinds_ms"].get(k), ".2f") for k in kinds)
            lines.append([row["model"], row["variant"], mix, *cells])
    return _align(lines)


def traffic_table(rows: Sequence[Row]) -> str:
    """Megabytes that the first worker receives in each kind of step."""
    lines = [["model", "variant", "step", "received MB"]]
    for row in rows:
        for kind, parts in row.get("communication_bytes", {}).items():
            received = _megabytes(sum(parts.values()))
            lines.append([row["model"], row["variant"], kind, received])
    return _align(lines)


def _align(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the two of names to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(
                zip(line, widths, strict=True)
            )
        ).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Row]) -> str:
    """The tables of `tables` in Markdown, with their captions."""
    return "\n\n".join(
        markdown_table(table["columns"], table["rows"])
        + f"\n\n{table['caption']}"
        for table in tables(rows)
    )


def tables(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Two tables of variants by models: steps, and first steps."""
    parts = []
    if timed := [row for row in rows if "mixes" in row]:
        mixes = _mixes(timed)
        caption = (
            f"Time of a step over that of SGD, at intervals {' / '.join(mixes)}"
            f"; in brackets the longest step over the median one at {mixes[0]}"
            ". SGD itself in milliseconds."
        )
        parts.append(_matrix(timed, _ratios) | {"caption": caption})
    if started := [row for row in rows if "first_step" in row]:
        seconds = _matrix(
            started, lambda r: f"{r['first_step']['cpu_seconds']:.1f}"
        )
        caption = "Processor seconds of the first step."
        parts.append(seconds | {"caption": caption})
    return parts


def _matrix(rows: Sequence[Row], cell: Callable[[Row], str]) -> dict[str, Any]:
    models = dict.fromkeys(row["model"] for row in rows)
    variants = dict.fromkeys(row["variant"] for row in rows)
    cells = {(row["model"], row["variant"]): cell(row) for row in rows}
    lines = [
        [f"`{variant}`", *(cells.get((model, variant), "") for model in models)]
        for variant in variants
    ]
    return {"columns": ["", *models], "rows": lines}


def _ratios(row: Row) -> str:
    first, *_ = costs = list(row["mixes"].values())
    variant = parse(row["variant"])
    if variant.text == "sgd":
        return f"{first['mean_ms']:.1f} ms"
    if not variant.is_kfac:  # the same at all intervals
        return _number(first.get("ratio"), ".2f")
    ratios = (_number(cost.get("ratio"), ".2f") for cost in costs)
    return f"{' / '.join(ratios)} ({_longest(first):.1f})"


def _longest(cost: Mapping[str, Any]) -> float:
    return cost["longest_ms"] / cost["median_ms"]


def _mixes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(m for row in rows for m in row.get("mixes", {})))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / MEGABYTE:.1f}"
