"""Assignment of decompositions and preconditioning to workers.

A plan is pure Python and deterministic: every worker computes the same plan
from the same shapes, without communication.

The workers form the grid of KAISA (section 3.1), numbered row by row as in
its authors' code. With two gradient workers per layer on eight workers:

    0 1 2 3
    4 5 6 7

A column contains the gradient workers of a layer. They have the layer's
decompositions and precondition its gradient. In every step each gradient
worker broadcasts the result along its row, all rows in parallel.
Decompositions are broadcast down a column only after an inverse update.
Workers with adjacent ranks, which often share a machine, are therefore in the
same row. The paper's figure 4 is transposed: with four gradient workers on
eight, process 0 sends to process 4 there, and to process 1 here.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

# Policies of load balancing.
POLICIES = ("compute", "memory", "round_robin")


class Work(Protocol):
    """Size and cost of a factor."""

    @property
    def elements(self) -> int:
        """Number of stored elements."""

    @property
    def operations(self) -> int:
        """Approximate number of operations of a decomposition."""


# Factors of a layer, or their shapes, by name.
Shapes = Mapping[str, Work | tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Mode:
    """Use of the workers in one of the distribution modes of K-FAC."""

    # Number per layer; "fraction" if set by `gradient_worker_fraction`.
    gradient_workers: Literal["all", "one", "fraction"]
    # True if factors are averaged over the batches of all workers. False if a
    # factor uses only its owner's batches.
    reduces_factors: bool = True
    policy: str = "compute"


# Papers, in this order: Distributed K-FAC (two modes), KAISA, DP-KFAC.
MODES: dict[str, Mode] = {
    "comm_opt": Mode("all"),
    "mem_opt": Mode("one"),
    "hybrid_opt": Mode("fraction"),
    "dp_kfac": Mode("one", reduces_factors=False, policy="round_robin"),
}


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Owners, gradient workers and receivers of one layer."""

    # Worker that decomposes a factor, by the factor's name.
    owners: Mapping[str, int]
    # Workers that need all decompositions, in ascending order.
    gradient_workers: tuple[int, ...]
    # Workers that receive the preconditioned gradient, by its sender.
    receivers: Mapping[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Assignment of all layers to workers."""

    mode: Mode
    workers: int
    layers: tuple[LayerPlan, ...]

    def owns(self, rank: int, layer: int) -> tuple[str, ...]:
        """Names of a layer's factors that a worker stores and decomposes."""
        owners = self.layers[layer].owners
        return tuple(name for name, owner in owners.items() if owner == rank)

    def preconditions(self, rank: int, layer: int) -> bool:
        """True if a worker is a gradient worker of a layer."""
        return rank in self.layers[layer].gradient_workers

    def observes(self, rank: int, layer: int) -> bool:
        """True if a worker's batch contributes to the factors of a layer."""
        return self.mode.reduces_factors or bool(self.owns(rank, layer))

    @property
    def shares_clocks(self) -> bool:
        """True if all workers update factors and inverses in the same steps."""
        return self.workers == 1 or self.mode.reduces_factors

    @property
    def reduces_factors(self) -> bool:
        """True if statistics are summed over several workers."""
        return self.workers > 1 and self.mode.reduces_factors

    @property
    def columns(self) -> int:
        """Number of columns of the grid, see the module's docstring."""
        if not self.layers:
            return 1
        return self.workers // len(self.layers[0].gradient_workers)


def plan_layers(
    shapes: Sequence[Shapes],
    workers: int,
    mode: str,
    fraction: float | None = None,
    policy: str | None = None,
    whole_layers: bool = False,
) -> tuple[LayerPlan, ...]:
    """Plan the owners, gradient workers and receivers of every layer.

    - `comm_opt`: each factor has an owner; all workers are gradient workers.
    - `mem_opt`, `dp_kfac`: each layer has an owner, the only gradient worker.
    - `hybrid_opt`: each layer has an owner; the gradient workers are the
      owner's column of the grid. Equal to `comm_opt` if `fraction=1`.

    `shapes` has the factors of every layer, or their shapes, by name.
    `fraction` is for `hybrid_opt`, by default about half. `policy` is by
    default the mode's policy. With `whole_layers`, all factors of a layer have
    the same owner, also with `comm_opt`.
    """
    settings = MODES[mode]
    if policy is None:
        policy = settings.policy
    if settings.gradient_workers == "fraction":
        count = gradient_workers(workers, fraction)
    else:
        count = workers if settings.gradient_workers == "all" else 1
    work = [
        {name: cost(factor, policy) for name, factor in layer.items()}
        for layer in shapes
    ]
    owners: list[dict[str, int]]
    if settings.reduces_factors and count == workers and not whole_layers:
        # The grid has one column with all workers.
        costs = [c for layer in work for c in layer.values()]
        assigned = iter(assign(costs, workers, policy))
        owners = [{name: next(assigned) for name in layer} for layer in work]
    elif policy == "round_robin":
        # Count layers with one factor (normalisation) and with two separately:
        # they often alternate, and the first of two workers would own all large
        # factors.
        counts: collections.Counter[int] = collections.Counter()
        owners = []
        for layer in work:
            owners.append(dict.fromkeys(layer, counts[len(layer)] % workers))
            counts[len(layer)] += 1
    else:
        costs = [sum(layer.values()) for layer in work]
        tasks = zip(work, assign(costs, workers, policy), strict=True)
        owners = [dict.fromkeys(layer, worker) for layer, worker in tasks]
    # Share the tuples among the layers of a column, to save memory.
    width = workers // count
    by_column = [min(layer.values(), default=0) % width for layer in owners]
    columns = {i: tuple(range(i, workers, width)) for i in set(by_column)}
    receivers = {
        column: {
            worker: tuple(
                worker - column + i for i in range(width) if i != column
            )
            for worker in members
        }
        for column, members in columns.items()
    }
    return tuple(
        LayerPlan(layer, columns[column], receivers[column])
        for layer, column in zip(owners, by_column, strict=True)
    )


# ------------------------------------------------------------- assignment
def cost(shape: Work | Sequence[int], policy: str) -> int:
    """Operations of a decomposition; elements for the policy "memory".

    The shape is `(n, n)` or `(groups, n, n)`, with `n^3` operations per matrix,
    or `(n,)` for a diagonal, with n operations.
    """
    if isinstance(shape, Sequence):
        elements = math.prod(shape)
        operations = elements * shape[-1] if len(shape) > 1 else elements
    else:
        elements, operations = shape.elements, shape.operations
    return elements if policy == "memory" else operations


def assign(costs: Sequence[int], workers: int, policy: str) -> tuple[int, ...]:
    """Assign tasks to workers and return the worker of every task.

    "compute" and "memory" assign the most expensive remaining task to the
    worker with the least load (longest processing time first). The makespan is
    at most `4/3 - 1/(3 workers)` times the optimum. Ties are broken by the
    order of the tasks and the rank of the workers. "round_robin" ignores costs.
    """
    if policy == "round_robin":
        return tuple(task % workers for task in range(len(costs)))
    # Skip later workers: ties prefer low ranks, so they would get no task.
    loads = [0] * min(workers, len(costs))
    assignment = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda t: (-costs[t], t)):
        worker = min(range(len(loads)), key=loads.__getitem__)
        loads[worker] += costs[task]
        assignment[task] = worker
    return tuple(assignment)


# -------------------------------------------------------- gradient workers
def gradient_workers(workers: int, fraction: float | None) -> int:
    """Number of gradient workers of a layer, `max(1, fraction * workers)`.

    Without a fraction, return the divisor of `workers` that is nearest to half
    of them (KAISA, section 5). Above one worker this is the largest divisor
    that is not above half, so two divisors are never equally near.
    """
    divisors = [n for n in range(1, workers + 1) if workers % n == 0]
    if fraction is None:
        return min(divisors, key=lambda n: abs(2 * n - workers))
    product = max(1.0, fraction * workers)
    count = round(product)
    if not math.isclose(product, count, rel_tol=1e-6) or workers % count:
        allowed = ", ".join([f"{n}/{workers}" for n in divisors[:-1]] + ["1"])
        raise ValueError(
            "Argument `gradient_worker_fraction` times the number of workers "
            "must be a whole number that divides the number of workers: one "
            f"of {allowed} with {workers} workers. Received: "
            f"gradient_worker_fraction={fraction!r}"
        )
    return count
