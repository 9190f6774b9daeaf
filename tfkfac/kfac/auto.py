"""The distribution that the cost model chooses: `distribution="auto"`.

It changes how long a step takes, never what it does: "dp_kfac" has factors of
another batch, and is the user's to choose.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfkfac.blocks.registry import build_registry
from tfkfac.capture.walk import SkipRule
from tfkfac.cost import Estimate, Machine, recommend
from tfkfac.cost.choice import candidates, compare_plans
from tfkfac.cost.estimate import Workload
from tfkfac.cost.measure import agree, measure_network, measure_worker
from tfkfac.distributed.plan import MODES
from tfkfac.distributed.topology import Topology
from tfkfac.factors import Limit
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.schedule import LATE
from tfkfac.kfac.settings import AUTO, Settings
from tfkfac.shell.hyperparameters import Hyperparameter
from tfkfac.solvers import SOLVERS
from tfkfac.training.job import Job

# What is assumed where nothing has been measured: a core, a GPU; a network of
# 1 and of 100 Gbit/s.
_ASSUMED = {
    "auto": Machine.of(1e11, 1.25e8, 1e-4, tree_broadcast=True),
    "nccl": Machine.of(1e13, 1.25e10, 1e-5),
}


class Placer:
    """Places blocks on workers, and keeps what it has chosen.

    Args:
        settings: How the work is distributed, perhaps by "auto".
        solver: Name of the solver.
        skip_layers: Layers to leave to the inner optimizer.
        limit: Which factors are kept whole.

    Attributes:
        lines: What a summary says of the choice; nothing if there is none.
    """

    def __init__(
        self,
        settings: Settings,
        solver: str,
        skip_layers: Sequence[SkipRule],
        limit: Limit,
    ) -> None:
        self._settings = settings
        self._solver = solver
        self._skip_layers = skip_layers
        self._limit = limit
        self._machine: Machine | None = None
        self._chosen: Settings | None = None
        self.lines: list[str] = []

    def measure(self, job: Job) -> None:
        """Measures the machine, if it matters; all workers have to call it.

        What has been measured, and chosen, stays.
        """
        topology = job.topology
        chooses = self._settings.distribution == AUTO and topology.replicas > 1
        if not chooses or self._machine is not None:
            return
        numbers: dict[str, Any] = measure_worker()
        if len(topology.local) > 1:  # the replicas share a memory
            numbers["bandwidth"] = numbers["memory"]
        if topology.processes > 1:
            group = job.among_processes("machine")
            if _shows_network(topology):
                numbers |= measure_network(group)
            numbers = agree(numbers, group)
        assumed = _ASSUMED[topology.hint]
        self._machine = dataclasses.replace(assumed, **numbers)
        self._chosen = None

    def place(self, job: Job, *intervals: Hyperparameter) -> Placement:
        """Places the blocks of a model.

        Args:
            job: The job.
            *intervals: Those of factors and of decompositions.
        """
        registry = build_registry(job.model, self._skip_layers, self._limit)
        solver = SOLVERS[self._solver]()
        if self._settings.distribution != AUTO:
            return Placement(registry, job.topology, solver, self._settings)
        plain = dataclasses.replace(self._settings, distribution="comm_opt")
        placement = Placement(registry, job.topology, solver, plain)
        if self._chosen is None:
            self._choose(placement, job, _steps(*intervals))
        assert self._chosen is not None
        if self._chosen == plain:
            return placement
        return Placement(registry, job.topology, solver, self._chosen)

    def _choose(
        self,
        placement: Placement,
        job: Job,
        steps: tuple[int, int],
    ) -> None:
        topology, settings = job.topology, placement.settings
        self._chosen = settings
        if topology.replicas == 1:
            self.lines = ["Distribution: comm_opt, as there is one worker."]
            return
        machine = self._machine or _ASSUMED[topology.hint]
        same = [name for name, mode in MODES.items() if mode.reduces_factors]
        load = Workload(
            placement.blocks,
            placement.turns,
            gradients=0,
            wire=placement.exchange.wire,
            assignment=settings.assignment,
            first_order=0.0,
        )
        some = list(candidates(topology.replicas, [self._solver], same))
        found = compare_plans(load, some, machine, topology.replicas)
        best = recommend(found, *steps)
        self._chosen = dataclasses.replace(
            settings,
            distribution=best.candidate.distribution,
            fraction=best.candidate.fraction,
        )
        self.lines = [
            f"Distribution: {best.candidate.text}, chosen by what K-FAC adds "
            f"to a step at intervals {steps[0]} and {steps[1]}:",
            *(_line(one, steps) for one in found),
            self._numbers(machine, topology),
        ]

    def _numbers(self, machine: Machine, topology: Topology) -> str:
        """What the choice is based on."""
        work = "assumed" if self._machine is None else "measured"
        sent = work if _shows_network(topology) else "assumed"
        return (
            f"with {machine.flops / 1e9:.3g} GFLOP/s, {work}, and "
            f"{machine.bandwidth / 1e9:.3g} GB/s and "
            f"{1e6 * machine.latency:.3g} us between workers, {sent}."
        )


def _shows_network(topology: Topology) -> bool:
    """Whether messages of processes go where those of the step do."""
    return topology.processes > 1 and topology.hint != "nccl"


def _steps(factor: Hyperparameter, inverse: Hyperparameter) -> tuple[int, int]:
    """The intervals; where they change, those of the measured schedule."""
    given = (factor.get(), inverse.get())
    late = [
        value if isinstance(value, int) else schedule
        for value, schedule in zip(given, LATE, strict=True)
    ]
    return late[0], late[1]


def _line(one: Estimate, steps: tuple[int, int]) -> str:
    milliseconds = 1e3 * one.amortised(*steps)
    megabytes = one.state["total"] / 2**20
    return (
        f"  {one.candidate.text}: {milliseconds:.3g} ms, "
        f"{megabytes:.3g} MB of state"
    )
