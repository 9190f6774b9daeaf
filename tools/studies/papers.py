"""The figures of the papers, and what the cost model says of them.

DP-KFAC (arXiv 2206.15143): counts of table 2, seconds of an iteration that
renews everything on 64 GPUs of table 5. KAISA (arXiv 2107.01739): which of its
distributions is quicker where updates are stale and where they are fresh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import keras

import experiments.printed  # noqa: F401
import tfkfac
from common.networks import without_biases
from cost_model import (
    Batch,
    Candidate,
    Estimate,
    Machine,
    Network,
    Workload,
    compare_plans,
)
from tfkfac.blocks import Block
from tfkfac.distributed.collectives import gradient_bytes

WORKERS = 64
# Fitted to the three times of ResNet-50 alone (`fit` does it anew): bandwidth
# and overhead. The products are taken at the peak of the cards, the latency is
# of the kind of network; without the bound on the products the fit is exact,
# at 21 TFLOP/s, which they do not have.
PEAK, LATENCY = 13.4e12, 5e-6
# A cluster like KAISA's by its parts, V100 and InfiniBand EDR; nothing of it is
# fitted. What COMM-OPT gains there over MEM-OPT; steps between updates of
# factors and of decompositions that are taken for stale.
KAISA_CLUSTER = Machine.of(15.7e12, 12.5e9, LATENCY)
KAISA_GAIN, STALE = 0.244, (50, 500)


class Marks(NamedTuple):
    """Seconds of an iteration in table 5 of the paper."""

    dp_kfac: float
    mem_opt: float
    comm_opt: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A network of the paper.

    Attributes:
        build: Builds it.
        batch: Examples of a worker.
        marks: The paper's seconds.
    """

    build: Callable[[], keras.Model]
    batch: int
    marks: Marks


CASES = {
    "ResNet-50": Case(
        lambda: without_biases(keras.applications.ResNet50(weights=None)),
        32,
        Marks(0.744, 1.204, 1.375),
    ),
    "DenseNet-201": Case(
        lambda: keras.applications.DenseNet201(weights=None),
        16,
        Marks(0.894, 1.624, 2.030),
    ),
}


class Counts(NamedTuple):
    """Table 2: elements of all factors, and of all weights."""

    factors: int
    weights: int


class PaperNetwork:
    """A network as the paper's programs see it.

    They precondition convolutions and dense layers only, keep every factor
    whole, take all examples, form the patches, and go round robin.

    Args:
        case: The network.
        solver: Name of the solver.
    """

    def __init__(self, case: Case, solver: str = "plain_inverse") -> None:
        model = case.build()
        optimizer: Any = tfkfac.KFAC(
            max_factor_dim=None,
            skip_layers=[keras.layers.BatchNormalization],
        ).attach(model)
        blocks = optimizer.method.placement.blocks
        network = Network(model, case.batch)
        batch = Batch.of(network, blocks, case.batch, 1.0, blocks)
        batch = dataclasses.replace(
            batch, statistics=_by_patches(network, blocks)
        )
        weights = gradient_bytes(model.trainable_variables)
        self._solver = solver
        self.counts = Counts(
            sum(f.elements for b in blocks for f in b.factors.values()),
            weights // 4,
        )
        self._load = Workload(
            blocks,
            optimizer.method.placement.schedule_groups,
            weights,
            assignment="round_robin",
            batch=batch,
        )

    def estimate(
        self, machine: Machine, modes: dict[str, float | None]
    ) -> list[Estimate]:
        """What some modes, with their fractions, cost on 64 workers."""
        some = [Candidate(m, f, self._solver) for m, f in modes.items()]
        return compare_plans(self._load, some, machine, WORKERS)

    def fresh(self, machine: Machine) -> Marks:
        """Seconds of an iteration that renews everything."""
        found = self.estimate(machine, dict.fromkeys(Marks._fields))
        return Marks(*(one.amortised(1, 1) for one in found))


def _by_patches(network: Network, blocks: tuple[Block, ...]) -> list[float]:
    """Multiplications of statistics that are made of all rows."""
    return [
        network.rows(block)
        * sum(f.multiplications for f in block.factors.values())
        for block in blocks
    ]


def fit(network: PaperNetwork, marks: Marks) -> Machine:
    """Bandwidth and overhead that come closest to the marks of a network.

    Seconds are linear in the overhead and in the inverse of the bandwidth, so
    that the least squares are those of a line.
    """
    slow, fast = (
        Machine.of(PEAK, bandwidth, LATENCY) for bandwidth in (1e9, 1e30)
    )
    fixed = network.fresh(fast)
    sent = [a - b for a, b in zip(network.fresh(slow), fixed, strict=True)]
    rest = [a - b for a, b in zip(marks, fixed, strict=True)]
    mean_sent, mean_rest = (sum(v) / len(v) for v in (sent, rest))
    slope = sum(
        (s - mean_sent) * (r - mean_rest)
        for s, r in zip(sent, rest, strict=True)
    ) / sum((s - mean_sent) ** 2 for s in sent)
    overhead = mean_rest - slope * mean_sent
    return Machine.of(PEAK, 1e9 / slope, LATENCY, overhead=overhead)


class Kaisa(NamedTuple):
    """Mean seconds of a step of KAISA on a cluster, by mode.

    Attributes:
        stale: With factors and decompositions that last.
        fresh: With both renewed in every step.
    """

    stale: dict[str, float]
    fresh: dict[str, float]

    @property
    def gain(self) -> float:
        """What COMM-OPT spares of a step of MEM-OPT with stale updates."""
        return 1 - self.stale["comm_opt"] / self.stale["mem_opt"]

    @classmethod
    def of(cls, network: PaperNetwork, machine: Machine) -> Self:
        """Estimates the three modes."""
        modes = {"comm_opt": None, "hybrid_opt": 0.5, "mem_opt": None}
        found = network.estimate(machine, modes)
        stale, fresh = (
            {one.candidate.text: one.amortised(*steps) for one in found}
            for steps in (STALE, (1, 1))
        )
        return cls(stale, fresh)


def hop_of_kaisa(network: PaperNetwork) -> float:
    """Seconds of a hop with which COMM-OPT gains what KAISA says.

    The seconds of a step are linear in those of a hop.
    """
    at = {
        hop: Kaisa.of(
            network, dataclasses.replace(KAISA_CLUSTER, latency=hop)
        ).stale
        for hop in (0.0, LATENCY)
    }
    # Zero where COMM-OPT gains just that.
    none, some = (
        times["comm_opt"] - (1 - KAISA_GAIN) * times["mem_opt"]
        for times in at.values()
    )
    return LATENCY * none / (none - some)


class Reproduction(NamedTuple):
    """What the model says of the papers' figures.

    Attributes:
        machine: The cluster, fitted to ResNet-50.
        counts: Table 2, by network.
        times: Table 5, by network: the model's seconds and the paper's.
        fitted: KAISA on that cluster.
        own: KAISA on a cluster like its own.
        hop: Seconds of a hop there with which it gains what the paper says.
    """

    machine: Machine
    counts: dict[str, Counts]
    times: dict[str, tuple[Marks, Marks]]
    fitted: Kaisa
    own: Kaisa
    hop: float


def reproduce() -> Reproduction:
    """Counts and times of all networks."""
    networks = {name: PaperNetwork(case) for name, case in CASES.items()}
    machine = fit(networks["ResNet-50"], CASES["ResNet-50"].marks)
    eigen = PaperNetwork(CASES["ResNet-50"], "eigen")
    return Reproduction(
        machine,
        {name: network.counts for name, network in networks.items()},
        {
            name: (network.fresh(machine), CASES[name].marks)
            for name, network in networks.items()
        },
        Kaisa.of(eigen, machine),
        Kaisa.of(eigen, KAISA_CLUSTER),
        hop_of_kaisa(eigen),
    )
