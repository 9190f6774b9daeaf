"""All distributions of a model's blocks, compared."""

from collections.abc import Iterator, Sequence
from typing import Any

from tfkfac.blocks.registry import build_registry
from tfkfac.checks import check_choice, check_count
from tfkfac.cost.batch import Batch
from tfkfac.cost.estimate import (
    Candidate,
    Estimate,
    Estimator,
    Workload,
)
from tfkfac.cost.machine import Machine
from tfkfac.cost.network import Network
from tfkfac.distributed.plan import MODES, Plan, plan_layers
from tfkfac.distributed.wire import gradient_bytes
from tfkfac.solvers import SOLVERS

# What is no quicker than this, compared to the quickest, is not worth memory.
_LEVEL = 1.02


def candidates(
    workers: int, solvers: Sequence[str], distributions: Sequence[str]
) -> Iterator[Candidate]:
    """All distributions, with each fraction that is not another mode's.

    Args:
        workers: Number of workers.
        solvers: Names of solvers.
        distributions: Names of modes.
    """
    for solver in solvers:
        for mode in distributions:
            if MODES[mode].gradient_workers != "fraction":
                yield Candidate(mode, None, solver)
                continue
            # Of one worker and of all it is "mem_opt" and "comm_opt".
            for count in range(2, workers):
                if workers % count == 0:
                    yield Candidate(mode, count / workers, solver)


def compare_plans(
    load: Workload,
    some: Sequence[Candidate],
    machine: Machine,
    workers: int,
) -> list[Estimate]:
    """Estimates the cost of distributions.

    Args:
        load: What is distributed.
        some: The distributions.
        machine: The machine.
        workers: Number of workers.
    """
    factors = [block.factors for block in load.blocks]
    solvers = {name: SOLVERS[name]() for _, _, name in some}
    estimators = {
        name: Estimator(load, solver, machine, workers)
        for name, solver in solvers.items()
    }
    found = []
    for one in some:
        layers = plan_layers(
            factors,
            workers,
            one.distribution,
            one.fraction,
            load.assignment,
            solvers[one.solver].whole_layers,
            load.turns,
        )
        plan = Plan(MODES[one.distribution], workers, layers)
        found.append(estimators[one.solver].estimate(one, plan))
    return found


def compare(
    optimizer: Any,
    machine: Machine,
    workers: int,
    batch: int,
    *,
    solvers: Sequence[str] = ("inverse", "eigen"),
    size: int | None = None,
    passes: int = 0,
    first_order: float | None = None,
) -> list[Estimate]:
    """Estimates what K-FAC costs on a cluster, for every distribution.

    >>> optimizer = tfkfac.KFAC().attach(model)
    >>> machine = tfkfac.cost.Machine.of(14e12, 12.5e9, 5e-6)
    >>> tfkfac.cost.compare(optimizer, machine, workers=64, batch=32)

    Nothing is run. The arguments of the optimizer count, but for its
    distribution and solver.

    Args:
        optimizer: A `KFAC`, attached to a built model.
        machine: The machine.
        workers: Number of workers.
        batch: Examples of a worker's batch.
        solvers: Names of solvers to compare.
        size: What an unknown size of the model's input is, as an image's.
        passes: Further backward passes where factors are updated: 1 for the
            Fisher matrix "monte_carlo", 0 for "empirical".
        first_order: Seconds of a worker's step without K-FAC, if they are
            known. Defaults to None: they come of the machine's numbers.

    Returns:
        An estimate of each distribution.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If an argument is not allowed, or the model's inputs are
            not known.
    """
    check_count("workers", workers, 1)
    check_count("batch", batch, 1)
    check_count("passes", passes)
    for solver in solvers:
        check_choice("solvers", solver, tuple(SOLVERS))
    model = optimizer.bound_model()
    placement, method = optimizer.method.placement, optimizer.method
    work = Batch.of(
        Network(model, batch, size),
        placement.blocks,
        batch,
        method.factor_batch_fraction,
        build_registry(model, ()).blocks,
    )
    load = Workload(
        placement.blocks,
        placement.turns,
        gradient_bytes(model.trainable_variables),
        placement.exchange.wire,
        placement.distribution.assignment,
        work,
        passes,
        first_order,
    )
    some = list(candidates(workers, solvers, tuple(MODES)))
    return compare_plans(load, some, machine, workers)


def recommend(
    estimates: Sequence[Estimate], factor_interval: int, inverse_interval: int
) -> Estimate:
    """The quickest one; among those within 2 % of it that of least memory.

    Args:
        estimates: What to choose from.
        factor_interval: Steps between updates of the factors.
        inverse_interval: Steps between decompositions of a block.
    """
    intervals = factor_interval, inverse_interval
    least = min(one.amortised(*intervals) for one in estimates)
    level = [
        one for one in estimates if one.amortised(*intervals) <= _LEVEL * least
    ]
    return min(
        level, key=lambda one: (one.state["total"], one.amortised(*intervals))
    )
