"""Text tables for summaries."""

from collections.abc import Sequence


def unit_of(count: int) -> tuple[int, str]:
    """Choose the unit for a number of bytes: 3000 gives `(1024, "KB")`."""
    size = 1
    for unit in ("B", "KB", "MB"):
        if count < 1024 * size:
            return size, unit
        size *= 1024
    return size, "GB"


def bytes_text(count: int) -> str:
    """Format a number of bytes, for example "1.50 MB"."""
    size, unit = unit_of(count)
    return f"{count} B" if size == 1 else f"{count / size:.2f} {unit}"


def table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> list[str]:
    """Format rows as lines of a text table with aligned columns."""
    widths = [
        max(len(row[i]) for row in (header, *rows)) for i in range(len(header))
    ]

    def line(row: tuple[str, ...]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(text.ljust(width) for text, width in cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [rule, line(header), rule, *(line(row) for row in rows), rule]
