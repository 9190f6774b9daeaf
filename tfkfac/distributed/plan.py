"""Assignment of decompositions and preconditioning to workers.

Pure Python and deterministic: every worker computes the same plan from the
same shapes, so that a plan never has to be sent.

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

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from tfkfac.checks import check_choice, check_count, is_number

# Ways to balance an assignment.
POLICIES = ("compute", "memory", "round_robin")


class Work(Protocol):
    """The numbers of a factor that a plan depends on."""

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
        gradient_workers: Number of them a layer has, or that the user says it.
        reduces_factors: True if factors are of the batches of all workers; if
            not, of the owner's alone, and never sent.
        policy: The default assignment, one of `POLICIES`.
    """

    gradient_workers: Literal["all", "one", "fraction"]
    reduces_factors: bool = True
    policy: str = "compute"


# Distributed K-FAC (optimised; layer-wise), KAISA, DP-KFAC.
MODES: dict[str, Mode] = {
    "comm_opt": Mode("all"),
    "mem_opt": Mode("one"),
    "hybrid_opt": Mode("fraction"),
    "dp_kfac": Mode("one", reduces_factors=False, policy="round_robin"),
}


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Owners, gradient workers and receivers of one layer."""

    owners: Mapping[str, int]
    """The worker that decomposes each factor, by the factor's name."""
    gradient_workers: tuple[int, ...]
    """The workers that need all decompositions, in ascending order."""
    receivers: Mapping[int, tuple[int, ...]]
    """The workers to which each gradient worker sends its result."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement of all layers on the workers."""

    mode: Mode
    workers: int
    layers: tuple[LayerPlan, ...]

    def owns(self, rank: int, layer: int) -> tuple[str, ...]:
        """Names of the factors of a layer that a worker keeps."""
        owners = self.layers[layer].owners
        return tuple(name for name, owner in owners.items() if owner == rank)

    def preconditions(self, rank: int, layer: int) -> bool:
        """True if a worker is a gradient worker of a layer."""
        return rank in self.layers[layer].gradient_workers

    def observes(self, rank: int, layer: int) -> bool:
        """True if a worker's batch goes into the factors of a layer."""
        return self.mode.reduces_factors or bool(self.owns(rank, layer))

    @property
    def shares_clocks(self) -> bool:
        """True if all workers update factors and inverses at the same steps."""
        return self.workers == 1 or self.mode.reduces_factors

    @property
    def reduces_factors(self) -> bool:
        """True if statistics are added up over the workers."""
        return self.workers > 1 and self.mode.reduces_factors

    @property
    def sends_decompositions(self) -> bool:
        """True if a worker needs a decomposition that another one makes."""
        return any(
            len(self.decomposition_group(i, name)) > 1
            for i, layer in enumerate(self.layers)
            for name in layer.owners
        )

    @property
    def observers(self) -> int:
        """Number of workers whose batches a layer's factors are of."""
        return self.workers if self.mode.reduces_factors else 1

    @property
    def columns(self) -> int:
        """Number of groups of gradient workers, see the head of this module."""
        if not self.layers:
            return 1
        return self.workers // len(self.layers[0].gradient_workers)

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


def plan_layers(
    shapes: Sequence[Shapes],
    workers: int,
    mode: str,
    fraction: float | None = None,
    policy: str | None = None,
    whole_layers: bool = False,
    turns: Sequence[int] | None = None,
) -> tuple[LayerPlan, ...]:
    """Owners, gradient workers and receivers of every layer.

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
        policy: One of `POLICIES`; None is the mode's.
        whole_layers: True if all factors of a layer have one owner, with
            `comm_opt` too.
        turns: The turn in which each layer is decomposed; None is one turn.

    Raises:
        ValueError: If an argument is not allowed.
    """
    check_choice("distribution", mode, tuple(MODES))
    chosen = MODES[mode]
    if policy is None:
        policy = chosen.policy
    count = _count_gradient_workers(mode, workers, fraction)
    work = [
        {name: cost(factor, policy) for name, factor in layer.items()}
        for layer in shapes
    ]
    if chosen.reduces_factors and count == workers and not whole_layers:
        owners = _assign_factors(work, workers, policy, turns)
    else:
        owners = _assign_layers(work, workers, policy, turns)
    # Layers of one column share its tuples: of thousands of workers these are
    # what a plan is made of.
    width = workers // count
    columns = {
        column: tuple(range(column, workers, width))
        for column in {home % width for home, _ in owners}
    }
    receivers = {
        column: _receivers(members, width)
        for column, members in columns.items()
    }
    return tuple(
        LayerPlan(layer, columns[home % width], receivers[home % width])
        for home, layer in owners
    )


# The worker whose column a layer goes to, and the owner of each factor.
_Owners = list[tuple[int, dict[str, int]]]


def _assign_layers(
    work: Sequence[Mapping[str, int]],
    workers: int,
    policy: str,
    turns: Sequence[int] | None,
) -> _Owners:
    """Distributes whole layers.

    Layers with one small factor (normalisation) often alternate with layers
    with two. They take turns of their own, or round robin over two workers
    would give all the work to one.
    """
    if policy == "round_robin":
        counts: collections.Counter[int] = collections.Counter()
        homes = []
        for layer in work:
            homes.append(counts[len(layer)] % workers)
            counts[len(layer)] += 1
    else:
        costs = [sum(w.values()) for w in work]
        homes = [*assign(costs, workers, policy, turns)]
    return [
        (worker, dict.fromkeys(layer, worker))
        for worker, layer in zip(homes, work, strict=True)
    ]


def _assign_factors(
    work: Sequence[Mapping[str, int]],
    workers: int,
    policy: str,
    turns: Sequence[int] | None,
) -> _Owners:
    """Distributes single factors; all workers are in the only column."""
    costs = [c for w in work for c in w.values()]
    if turns is not None:
        pairs = zip(turns, work, strict=True)
        turns = [turn for turn, layer in pairs for _ in layer]
    chosen = iter(assign(costs, workers, policy, turns))
    return [(0, {name: next(chosen) for name in layer}) for layer in work]


def _receivers(column: Sequence[int], width: int) -> dict[int, tuple[int, ...]]:
    """The other workers of the row of each worker of a column."""
    rows = {worker: worker // width * width for worker in column}
    return {
        worker: tuple(
            other for other in range(start, start + width) if other != worker
        )
        for worker, start in rows.items()
    }


# ------------------------------------------------------------- assignment
def cost(shape: Work | Sequence[int], policy: str) -> int:
    """Cost of decomposing a factor.

    Args:
        shape: The factor, or its shape: `(n, n)`, `(groups, n, n)`, or `(n,)`
            for a diagonal.
        policy: `memory` counts elements, the others about operations: n^3 for
            a matrix, n for a diagonal.
    """
    check_choice("assignment", policy, POLICIES)
    if isinstance(shape, Sequence):
        elements = math.prod(shape)
        operations = elements * shape[-1] if len(shape) > 1 else elements
    else:
        elements, operations = shape.elements, shape.operations
    return elements if policy == "memory" else operations


def assign(
    costs: Sequence[int],
    workers: int,
    policy: str,
    turns: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The worker of every piece of work.

    `compute` and `memory` give the next most costly piece to the worker with
    the least work: the longest processing time first, which takes at most
    4/3 - 1/(3 workers) of the best possible time. Equals go by their order,
    the earlier piece first and to the lowest worker. `round_robin` ignores
    the costs.

    Where the work is done in turns, with all workers waiting for each other
    after each, `compute` balances every turn, and the whole among equals.
    """
    check_count("workers", workers, 1)
    check_choice("assignment", policy, POLICIES)
    if policy == "round_robin":
        return tuple(piece % workers for piece in range(len(costs)))
    if turns is None or policy == "memory":
        turns = [0] * len(costs)
    # Of idle workers the lowest is taken: no more of them than pieces.
    some = range(min(workers, len(costs)))
    loads = {turn: [0] * len(some) for turn in turns}
    totals = [0] * len(some)
    chosen = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda p: (-costs[p], p)):
        load = loads[turns[piece]]
        worker = min(some, key=lambda w: (load[w], totals[w]))
        load[worker] += costs[piece]
        totals[worker] += costs[piece]
        chosen[piece] = worker
    return tuple(chosen)


# -------------------------------------------------------- gradient workers
def gradient_workers(workers: int, fraction: float) -> int:
    """Number of gradient workers of a layer, `max(1, fraction * workers)`.

    Raises:
        ValueError: If that is no whole number that divides `workers`.
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


def _fractions(workers: int) -> str:
    counts = [n for n in range(1, workers + 1) if workers % n == 0]
    return ", ".join("1" if n == workers else f"{n}/{workers}" for n in counts)


def _count_gradient_workers(
    mode: str, workers: int, fraction: float | None
) -> int:
    """Number of gradient workers of a layer."""
    wanted = MODES[mode].gradient_workers
    if wanted == "fraction" and fraction is not None:
        return gradient_workers(workers, fraction)
    if wanted == "fraction" or fraction is not None:
        raise ValueError(
            "Argument `gradient_worker_fraction` must be given with "
            "distribution='hybrid_opt', and with it alone. Received: "
            f"distribution={mode!r}, gradient_worker_fraction={fraction!r}"
        )
    return workers if wanted == "all" else 1
