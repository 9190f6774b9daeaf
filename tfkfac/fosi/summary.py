"""The table of what FOSI does."""

from collections.abc import Sequence

import numpy as np

from tfkfac.fosi.layouts import Geometry
from tfkfac.shell.tables import bytes_text, table


def describe(
    title: str,
    geometry: Geometry,
    estimations: str,
    state: dict[str, int],
    distribution: Sequence[tuple[str, str]],
    spectrum: np.ndarray,
) -> list[str]:
    """Returns the lines of the summary of an optimizer.

    Args:
        title: First line.
        geometry: Sizes.
        estimations: How many there were, or when the first comes.
        state: Bytes of the state by kind.
        distribution: Rows of the table that say who does what.
        spectrum: The Ritz values in use.
    """
    rows = [
        ("Weights", f"{geometry.size:,}"),
        (
            "Directions",
            f"{geometry.largest} of largest and {geometry.smallest} of "
            "smallest curvature",
        ),
        ("Lanczos steps", str(geometry.steps)),
        ("Estimations", estimations),
        ("State: directions", bytes_text(state["directions"])),
        ("State: Lanczos basis", bytes_text(state["basis"])),
        ("State: copies", bytes_text(state["copies"])),
        *distribution,
    ]
    if len(spectrum):
        text = ", ".join(f"{value:.4g}" for value in spectrum)
        rows.append(("Ritz values", text))
    return [title, "", *table(("", "Value"), rows)]
