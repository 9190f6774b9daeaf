"""Text tables of the summaries."""

from collections.abc import Sequence


def bytes_text(count: int) -> str:
    """A number of bytes with a unit."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GB"


def table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> list[str]:
    """Lays rows out in columns as wide as they need."""
    widths = [
        max(len(row[i]) for row in (header, *rows)) for i in range(len(header))
    ]

    def line(row: tuple[str, ...]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(text.ljust(width) for text, width in cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [rule, line(header), rule, *(line(row) for row in rows), rule]
