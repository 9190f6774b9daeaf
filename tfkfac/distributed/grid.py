"""Workers in a grid: who preconditions together, who sends to whom.

The workers form the grid of KAISA (section 3.1), numbered row by row as in
its authors' code. With two gradient workers per layer on eight workers:

    0 1 2 3
    4 5 6 7

A column holds the gradient workers of a layer: they have its decompositions
and precondition its gradient. Then each of them sends the result along its
row, and all rows do so at the same time. That is in every step, whereas
decompositions travel down a column once in many: neighbors in number, which
tend to share a machine, are neighbors in a row. For that reason the numbers
are not those of the paper's figure 4, which is transposed: with four gradient
workers on eight, process 0 sends to process 4 there and to process 1 here.
"""

import dataclasses
import math

from tfkfac.checks import check_count, is_number


@dataclasses.dataclass(frozen=True)
class Grid:
    """Workers in rows (receiver groups) and columns (gradient workers)."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


def gradient_workers(workers: int, fraction: float) -> int:
    """Number of gradient workers of a layer, `max(1, fraction * workers)`.

    Args:
        workers: Number of workers.
        fraction: The share of them, in (0, 1].

    Returns:
        A whole number that divides `workers`.

    Raises:
        ValueError: If there is none.
    """
    check_count("workers", workers, 1)
    if not is_number(fraction) or not 0 < fraction <= 1:
        raise ValueError(
            "Argument `gradient_worker_fraction` must be a number in (0, 1]. "
            f"Received: gradient_worker_fraction={fraction!r}"
        )
    product = max(1.0, float(fraction) * workers)
    count = round(product)
    if not math.isclose(product, count, rel_tol=1e-6) or workers % count:
        raise ValueError(
            "Argument `gradient_worker_fraction` times the number of workers "
            "must be a whole number that divides the number of workers: one "
            f"of {_fractions(workers)} with {workers} workers. Received: "
            f"gradient_worker_fraction={fraction!r}"
        )
    return count


def grid(workers: int, gradient_workers: int) -> Grid:
    """Arranges the workers row by row.

    Args:
        workers: Number of workers.
        gradient_workers: Number of rows, that is of workers in a column.

    Returns:
        The grid.

    Raises:
        ValueError: If `gradient_workers` does not divide `workers`.
    """
    check_count("workers", workers, 1)
    if gradient_workers < 1 or workers % gradient_workers:
        raise ValueError(
            "Argument `gradient_workers` must divide the number of workers. "
            f"Received: gradient_workers={gradient_workers} with {workers} "
            "workers"
        )
    width = workers // gradient_workers
    return Grid(
        rows=tuple(
            tuple(range(start, start + width))
            for start in range(0, workers, width)
        ),
        columns=tuple(
            tuple(range(start, workers, width)) for start in range(width)
        ),
    )


def _fractions(workers: int) -> str:
    counts = [n for n in range(1, workers + 1) if workers % n == 0]
    return ", ".join("1" if n == workers else f"{n}/{workers}" for n in counts)
