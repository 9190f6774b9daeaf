"""Compare figures of the papers with those of the cost model.

DP-KFAC (arXiv 2206.15143): counts of table 2, and seconds of an iteration with
all updates on 64 GPUs of table 5. KAISA (arXiv 2107.01739): the time that
COMM-OPT saves over MEM-OPT.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

import experiments.printed  # noqa: F401
import tfkfac
from cost_model import (
    Batch,
    Candidate,
    Estimate,
    Machine,
    Network,
    Workload,
    compare_plans,
)
from tfkfac.distributed.collectives import gradient_bytes
from tfkfac.shell.tables import table

WORKERS = 64
# Peak of the GPUs and latency of the type of network; `fit` chooses bandwidth
# and overhead. A fit of the peak, too, gives 21 TFLOP/s, more than these GPUs
# have.
PEAK, LATENCY = 13.4e12, 5e-6
# Peak and bandwidth of V100 and InfiniBand EDR as specified, not fitted.
KAISA_CLUSTER = Machine(15.7e12, 12.5e9, LATENCY)
# The gain that KAISA reports, and update intervals that count as stale.
KAISA_GAIN, STALE = 0.244, (50, 500)


def without_biases(model: keras.Model) -> keras.Model:
    """Return a new model whose convolutions have no biases.

    Keras adds biases before normalisation layers, other frameworks do not.
    """

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        config = layer.get_config()
        if isinstance(layer, keras.layers.Conv2D):
            config["use_bias"] = False
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=clone)


class Marks(NamedTuple):
    """Seconds of an iteration by distribution, as in table 5."""

    dp_kfac: float
    mem_opt: float
    comm_opt: float


class Case(NamedTuple):
    """A network of table 5: model, examples of a worker, seconds."""

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


class PaperNetwork:
    """A network with the settings of the paper's program.

    K-FAC covers convolutions and dense layers only, with whole factors of all
    examples, statistics from patches, and round-robin assignment.
    """

    def __init__(self, case: Case, solver: str = "plain_inverse") -> None:
        model = case.build()
        optimizer: Any = tfkfac.KFAC(
            step="natural",
            max_factor_dim=None,
            skip_layers=[keras.layers.BatchNormalization],
        ).attach(model)
        blocks = optimizer.method.placement.blocks
        network = Network(model, case.batch)
        batch = Batch.of(network, blocks, case.batch, 1.0, blocks)
        batch = dataclasses.replace(
            batch,
            statistics=[
                network.rows(block)
                * sum(f.multiplications for f in block.factors.values())
                for block in blocks
            ],
        )
        weights = gradient_bytes(model.trainable_variables)
        self._solver = solver
        factors = [f for block in blocks for f in block.factors.values()]
        self.num_factor_elements = sum(factor.elements for factor in factors)
        self.num_weights = weights // 4
        self._load = Workload(
            blocks,
            weights,
            batch,
            assignment="round_robin",
        )

    def estimate(
        self, machine: Machine, modes: dict[str, float | None]
    ) -> list[Estimate]:
        """Estimate modes, with gradient worker fractions, on 64 workers."""
        candidates = [Candidate(m, f, self._solver) for m, f in modes.items()]
        return compare_plans(self._load, candidates, machine, WORKERS)

    def fresh(self, machine: Machine) -> Marks:
        """Return the seconds of an iteration with all updates."""
        estimates = self.estimate(machine, dict.fromkeys(Marks._fields))
        return Marks(*(estimate.amortised(1, 1) for estimate in estimates))


def fit(network: PaperNetwork, marks: Marks) -> Machine:
    """Fit bandwidth and overhead to the seconds of a network.

    Seconds are linear in the overhead and in 1 / bandwidth.
    """
    slow, fast = (
        Machine(PEAK, bandwidth, LATENCY) for bandwidth in (1e9, 1e30)
    )
    fixed = network.fresh(fast)
    sent = [a - b for a, b in zip(network.fresh(slow), fixed, strict=True)]
    rest = [a - b for a, b in zip(marks, fixed, strict=True)]
    slope, overhead = statistics.linear_regression(sent, rest)
    return Machine(PEAK, 1e9 / slope, LATENCY, overhead)


def kaisa(
    network: PaperNetwork, machine: Machine, intervals: tuple[int, int] = STALE
) -> dict[str, float]:
    """Return the mean seconds of a step of KAISA, by mode, fastest first."""
    modes = {"comm_opt": None, "hybrid_opt": 0.5, "mem_opt": None}
    seconds = {
        estimate.candidate.text: estimate.amortised(*intervals)
        for estimate in network.estimate(machine, modes)
    }
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def gain(seconds: dict[str, float]) -> float:
    """Return the share of a step of MEM-OPT that COMM-OPT saves."""
    return 1 - seconds["comm_opt"] / seconds["mem_opt"]


def hop_of_kaisa(network: PaperNetwork) -> float:
    """Return the seconds of a hop with which the gain is `KAISA_GAIN`.

    The seconds of a step are linear in those of a hop.
    """
    differences = []
    for hop in (0.0, LATENCY):
        machine = dataclasses.replace(KAISA_CLUSTER, latency=hop)
        seconds = kaisa(network, machine)
        reduced = (1 - KAISA_GAIN) * seconds["mem_opt"]
        differences.append(seconds["comm_opt"] - reduced)
    none, some = differences
    return LATENCY * none / (none - some)


def report() -> str:
    """Return the papers' figures beside the model's."""
    networks = {name: PaperNetwork(case) for name, case in CASES.items()}
    machine = fit(networks["ResNet-50"], CASES["ResNet-50"].marks)
    lines = ["DP-KFAC, table 2: elements of factors and of weights"]
    for name, network in networks.items():
        lines.append(
            f"  {name}: {network.num_factor_elements / 1e6:.2f} M, "
            f"{network.num_weights / 1e6:.2f} M"
        )
    lines += [
        "  (the paper: ResNet-50 153.9 M, 25.6 M)",
        "",
        "DP-KFAC, table 5: seconds of an iteration on 64 GPUs. Fitted to "
        f"ResNet-50 only: {machine.bandwidth / 1e9:.3g} GB/s, "
        f"{machine.overhead:.3g} s of overhead",
    ]
    rows = []
    for name, network in networks.items():
        ours, paper = network.fresh(machine), CASES[name].marks
        for mode, mine, theirs in zip(ours._fields, ours, paper, strict=True):
            ratio = (ours.dp_kfac / mine) / (paper.dp_kfac / theirs)
            numbers = (f"{theirs:.3f}", f"{mine:.3f}", f"{ratio - 1:+.0%}")
            rows.append((name, mode, *numbers))
    header = "Network", "Distribution", "paper s", "model s", "ratio off by"
    lines += [*table(header, rows), ""]
    eigen = PaperNetwork(CASES["ResNet-50"], "eigen")
    for cluster, at in (("fitted", machine), ("V100", KAISA_CLUSTER)):
        for updates, intervals in (("stale", STALE), ("fresh", (1, 1))):
            seconds = kaisa(eigen, at, intervals)
            text = " < ".join(f"{m} {s:.4g} s" for m, s in seconds.items())
            lines.append(
                f"KAISA, {cluster} cluster, {updates} updates: {text}; "
                f"comm_opt saves {gain(seconds):.1%} of mem_opt"
            )
    hop = 1e6 * hop_of_kaisa(eigen)
    lines.append(
        f"  (the paper: 24.4 %, as with {hop:.1f} us a hop of a broadcast in "
        "place of 5 us)"
    )
    return "\n".join(lines)
