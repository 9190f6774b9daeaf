"""Which worker decomposes and preconditions what.

Pure Python and deterministic: every worker computes the same plan from the
same shapes, so that a plan never has to be sent.

The workers form the grid of KAISA (figure 4), numbered row by row. With two
gradient workers per layer on eight workers:

    0 1 2 3
    4 5 6 7

A column holds the gradient workers of a layer: they have its decompositions
and precondition its gradient. Then each of them sends the result along its
row, and all rows do so at the same time. That is in every step, whereas
decompositions travel down a column once in many: neighbors in number, which
tend to share a machine, are neighbors in a row.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

POLICIES = ("compute", "memory", "round_robin")


class Work(Protocol):
    """What a plan has to know of a factor."""

    @property
    def elements(self) -> int:
        """Number of elements that are kept."""

    @property
    def operations(self) -> int:
        """About how many operations a decomposition takes."""


# The factors of a layer by name, or their shapes.
Shapes = Mapping[str, Work | tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to distribute K-FAC over workers.

    Attributes:
        gradient_workers: How many of them a layer has, or that the user says.
        reduces_factors: Whether factors are of the batches of all workers; if
            not, of the owner's alone, and never sent.
        policy: What the assignment balances by default.
    """

    gradient_workers: Literal["all", "one", "fraction"]
    reduces_factors: bool = True
    policy: str = "compute"

    def count(self, workers: int, fraction: float | None) -> int:
        """Number of gradient workers of a layer."""
        if self.gradient_workers == "fraction":
            assert fraction is not None
            return gradient_workers(workers, fraction)
        return workers if self.gradient_workers == "all" else 1

    def splits_layers(self, count: int, workers: int) -> bool:
        """Whether the factors of a layer may have different owners."""
        return self.reduces_factors and count == workers


# Distributed K-FAC (optimised; layer-wise), KAISA, DP-KFAC.
MODES: dict[str, Mode] = {
    "comm_opt": Mode("all"),
    "mem_opt": Mode("one"),
    "hybrid_opt": Mode("fraction"),
    "dp_kfac": Mode("one", reduces_factors=False, policy="round_robin"),
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Workers in rows (receiver groups) and columns (gradient workers)."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Who does what for one layer."""

    owners: Mapping[str, int]
    """The worker that decomposes each factor, by the factor's name."""
    gradient_workers: tuple[int, ...]
    """The workers that need all decompositions, in ascending order."""
    receivers: Mapping[int, tuple[int, ...]]
    """Whom each gradient worker sends the preconditioned gradient to."""

    def owned_by(self, worker: int) -> tuple[str, ...]:
        """Names of the factors that `worker` decomposes."""
        return tuple(n for n, owner in self.owners.items() if owner == worker)


def plan_layers(
    shapes: Sequence[Shapes],
    workers: int,
    mode: str,
    fraction: float | None = None,
    policy: str | None = None,
) -> tuple[LayerPlan, ...]:
    """Plans every layer.

    - `comm_opt`: each factor has an owner of its own; all workers are gradient
      workers.
    - `mem_opt`, `dp_kfac`: each layer has an owner, the only gradient worker.
    - `hybrid_opt`: each layer has an owner; the gradient workers are the
      owner's column of the grid. With `fraction=1` it is `comm_opt`.

    Args:
        shapes: The factors of every layer by name, or their shapes, in the
            order of the layers.
        workers: Number of workers.
        mode: One of `MODES`.
        fraction: Share of the workers that are gradient workers of a layer;
            with `hybrid_opt` only, and required there.
        policy: What is balanced, one of `POLICIES`; None is `round_robin` for
            `dp_kfac` and `compute` for the others.

    Returns:
        A plan for every layer.

    Raises:
        ValueError: If an argument is not allowed.
    """
    _check_choice("distribution", mode, tuple(MODES))
    _check_fraction(mode, fraction)
    chosen = MODES[mode]
    if policy is None:
        policy = chosen.policy
    count = chosen.count(workers, fraction)
    places = grid(workers, count)
    work = [
        {name: cost(factor, policy) for name, factor in layer.items()}
        for layer in shapes
    ]
    if chosen.splits_layers(count, workers):
        owners = _assign_factors(work, workers, policy)
    else:
        owners = _assign_layers(work, workers, policy)
    return tuple(_plan_layer(places, home, layer) for home, layer in owners)


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
    _check_workers(workers)
    is_number = isinstance(fraction, numbers.Real)
    if not is_number or isinstance(fraction, bool) or not 0 < fraction <= 1:
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
    _check_workers(workers)
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


def cost(shape: Work | Sequence[int], policy: str) -> int:
    """Cost of decomposing a factor.

    Args:
        shape: The factor, or its shape: `(n, n)`, `(groups, n, n)`, or `(n,)`
            for a diagonal.
        policy: `memory` counts elements, the others about operations: n^3 for
            a matrix, n for a diagonal.
    """
    _check_choice("assignment", policy, POLICIES)
    if isinstance(shape, Sequence):
        elements = math.prod(shape)
        operations = elements * shape[-1] if len(shape) > 1 else elements
    else:
        elements, operations = shape.elements, shape.operations
    return elements if policy == "memory" else operations


def assign(costs: Sequence[int], workers: int, policy: str) -> tuple[int, ...]:
    """Distributes pieces of work.

    `compute` and `memory` give the next most costly piece to the worker with
    the least work: the longest processing time first, which takes at most
    4/3 - 1/(3 workers) of the best possible time. Equals go by their order,
    the earlier piece first and to the lowest worker. `round_robin` ignores
    the costs.

    Args:
        costs: Cost of every piece.
        workers: Number of workers.
        policy: One of `POLICIES`.

    Returns:
        The worker of every piece.
    """
    _check_workers(workers)
    _check_choice("assignment", policy, POLICIES)
    if policy == "round_robin":
        return tuple(piece % workers for piece in range(len(costs)))
    loads = [0] * workers
    chosen = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda p: (-costs[p], p)):
        worker = loads.index(min(loads))
        loads[worker] += costs[piece]
        chosen[piece] = worker
    return tuple(chosen)


# The worker whose column a layer goes to, and the owner of each factor.
_Owners = list[tuple[int, dict[str, int]]]


def _assign_layers(
    work: Sequence[Mapping[str, int]], workers: int, policy: str
) -> _Owners:
    chosen = _assign_pieces(work, workers, policy)
    return [
        (worker, dict.fromkeys(layer, worker))
        for worker, layer in zip(chosen, work, strict=True)
    ]


def _assign_pieces(
    work: Sequence[Mapping[str, int]], workers: int, policy: str
) -> Sequence[int]:
    """The worker of every layer.

    Layers with one small factor (normalisation) often alternate with layers
    with two. They take turns of their own, or round robin over two workers
    would give all the work to one.
    """
    if policy != "round_robin":
        return assign([sum(w.values()) for w in work], workers, policy)
    turns: dict[int, int] = {}
    chosen = []
    for layer in work:
        turn = turns.get(len(layer), 0)
        turns[len(layer)] = turn + 1
        chosen.append(turn % workers)
    return chosen


def _assign_factors(
    work: Sequence[Mapping[str, int]], workers: int, policy: str
) -> _Owners:
    """Distributes single factors; all workers are in the only column."""
    chosen = iter(
        assign([c for w in work for c in w.values()], workers, policy)
    )
    return [(0, {name: next(chosen) for name in layer}) for layer in work]


def _plan_layer(
    places: Grid, home: int, owners: Mapping[str, int]
) -> LayerPlan:
    column = next(c for c in places.columns if home in c)
    receivers = {
        sender: tuple(worker for worker in row if worker != sender)
        for sender, row in zip(column, places.rows, strict=True)
    }
    return LayerPlan(owners, column, receivers)


def _check_fraction(mode: str, fraction: float | None) -> None:
    wanted = MODES[mode].gradient_workers == "fraction"
    if wanted and fraction is None:
        raise ValueError(
            "Argument `gradient_worker_fraction` must be given with "
            f"distribution={mode!r}. Received: gradient_worker_fraction=None"
        )
    if fraction is not None and not wanted:
        raise ValueError(
            "Argument `gradient_worker_fraction` must be None unless "
            f"distribution='hybrid_opt'. Received: distribution={mode!r}, "
            f"gradient_worker_fraction={fraction!r}"
        )


def _fractions(workers: int) -> str:
    counts = [n for n in range(1, workers + 1) if workers % n == 0]
    return ", ".join("1" if n == workers else f"{n}/{workers}" for n in counts)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"Argument `{name}` must be one of {choices}. "
            f"Received: {name}={value!r}"
        )


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ValueError(
            f"Argument `workers` must be at least 1. Received: {workers=}"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement of all layers on the workers.

    Attributes:
        mode: The distribution mode.
        workers: Number of workers.
        layers: Who does what for each layer.
    """

    mode: Mode
    workers: int
    layers: tuple[LayerPlan, ...]

    def owns(self, rank: int, layer: int) -> tuple[str, ...]:
        """Names of the factors of a layer that a worker keeps."""
        return self.layers[layer].owned_by(rank)

    def preconditions(self, rank: int, layer: int) -> bool:
        """Whether a worker is a gradient worker of a layer."""
        return rank in self.layers[layer].gradient_workers

    def observes(self, rank: int, layer: int) -> bool:
        """Whether a worker's batch goes into the factors of a layer."""
        return self.mode.reduces_factors or bool(self.owns(rank, layer))

    @property
    def reduces_factors(self) -> bool:
        """Whether statistics are added up over the workers."""
        return self.workers > 1 and self.mode.reduces_factors

    def decomposition_group(self, layer: int, factor: str) -> tuple[int, ...]:
        """The owner of a factor and all that need its decomposition."""
        plan = self.layers[layer]
        return tuple(sorted({plan.owners[factor], *plan.gradient_workers}))

    def gradient_groups(self, layer: int) -> list[tuple[int, tuple[int, ...]]]:
        """Each gradient worker that sends, and its group."""
        receivers = self.layers[layer].receivers
        return [
            (worker, tuple(sorted((worker, *others))))
            for worker, others in receivers.items()
            if others
        ]
