"""The table of what a step takes."""

from collections.abc import Sequence

from tfkfac.gauss_newton.limits import Limits
from tfkfac.wrapper.tables import bytes_text, table

# Batches that are shown before a step has shown its own.
EXAMPLES = (100, 1_000, 10_000, 100_000)


def describe(
    titles: Sequence[str], limits: Limits, solve: str, residuals: int | None
) -> list[str]:
    """Returns the lines of the summary of an optimizer.

    Args:
        titles: The first lines.
        limits: Sizes.
        solve: The space that is allowed, or "auto".
        residuals: Number of residuals of the last step; None before the
            first.
    """
    rows = []
    for m in EXAMPLES if residuals is None else (residuals,):
        space = limits.space(solve, m)
        need = bytes_text(limits.bytes(space, m))
        allowed = "" if limits.allows(space, m) else " (too large)"
        rows.append((f"{m:,}", space, need + allowed))
    header = ("Residuals m", "Space", "Bytes of a step")
    return [*titles, "", *table(header, rows)]
