"""Tables of text."""

from collections.abc import Sequence


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is aligned left, the others right."""
    columns = zip(heading, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *map(str.rjust, row[1:], widths[1:]),
            ]
        )
        for row in (heading, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
