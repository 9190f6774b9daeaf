"""How a step's time, memory and traffic grow.

Networks of equal dense layers grow along one axis at a time: width, depth,
rows of a batch, workers. The kinds of step are timed by themselves, with
intervals of one step and of more steps than are run. The exponent of each
quantity is its slope over the largest sizes on logarithmic axes; beside it
stands that of the counted one (`COUNTS`) by the same fit.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.data import mlp_size
from benchmarks.jobs import Job, Setting
from benchmarks.variants import parse

BASE = parse("sgd")
# Exact factors at every width.
KFAC = parse("kfac-inverse:max_factor_dim=16384")
NEVER = 10**6  # steps
KINDS = {"plain": (NEVER, NEVER), "factor": (1, NEVER), "inverse": (1, 1)}
STEPS = {"plain": 20, "factor": 10, "inverse": 3}
FITTED = 3  # sizes, the largest ones


@dataclasses.dataclass(frozen=True)
class Axis:
    """Sizes along which something grows.

    Attributes:
        name: Of the axis.
        sizes: All of them.
        quick: How many of them `--quick` takes.
        make: Returns the model and what changes in the setting.
    """

    name: str
    sizes: tuple[int, ...]
    quick: int
    make: Callable[[int], tuple[str, dict[str, Any]]]


AXES = (
    Axis(
        "width",
        (256, 512, 1024, 2048, 4096),
        3,
        lambda size: (f"mlp-{size}x2", {}),
    ),
    Axis(
        "depth",
        (2, 4, 8, 16, 32),
        3,
        lambda size: (f"mlp-256x{size}", {}),
    ),
    Axis(
        "batch",
        (64, 256, 1024, 4096),
        3,
        lambda size: ("mlp-512x2", {"batch": size}),
    ),
    Axis(  # a core each: more workers are more processors
        "workers",
        (1, 2, 4),
        2,
        lambda size: (
            "mlp-512x2",
            {"workers": size, "mode": "fit", "threads": 1},
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """What the counts depend on: equal layers of W + 1 inputs, W outputs."""

    width: int
    depth: int
    batch: int
    workers: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.depth * (self.width + 1) * self.width

    @property
    def message(self) -> int:
        """Gradients, and of each layer a flag and four faults."""
        return self.weights + 5 * self.depth

    @property
    def factors(self) -> int:
        """Elements of A and G of all layers."""
        return self.depth * ((self.width + 1) ** 2 + self.width**2)

    @property
    def rows(self) -> float:
        """Rows of a worker's batch."""
        return self.batch / self.workers

    @property
    def reduced(self) -> float:
        """How often a worker receives what a ring reduces to all."""
        return 2 * (self.workers - 1) / self.workers


def sgd_step(size: Size) -> float:
    """Multiplications: forward, to the inputs and to the weights."""
    return 3 * size.rows * size.weights


def plain_step(size: Size) -> float:
    """And A^-1 W G^-1, as matrices or on the rows of a and g."""
    matrices = size.depth * 2 * size.width**3
    return sgd_step(size) + min(matrices, size.rows * size.factors)


def factor_step(size: Size) -> float:
    """And a^T a, g^T g."""
    return plain_step(size) + size.rows * size.factors


def inverse_step(size: Size) -> float:
    """And two inverses a layer, each by one of the workers."""
    inverses = size.depth * ((size.width + 1) ** 3 + size.width**3)
    return factor_step(size) + inverses / size.workers


def state_bytes(size: Size) -> float:
    """All inverses and this worker's part of the factors, in float32."""
    return 4 * size.factors * (1 + 1 / size.workers)


def factor_traffic(size: Size) -> float:
    """Received in a step that updates the factors."""
    return 4 * (size.message + size.factors) * size.reduced


def inverse_traffic(size: Size) -> float:
    """Received where inverses are renewed: those of the other workers."""
    others = 1 - 1 / size.workers
    return 4 * (size.message * size.reduced + size.factors * others)


# Operations for seconds, bytes for bytes; for the first step layers.
COUNTS: Mapping[str, Callable[[Size], float]] = {
    "SGD step": sgd_step,
    "plain step": plain_step,
    "factor step": factor_step,
    "inverse step": inverse_step,
    "first step": lambda size: size.depth,
    "state": state_bytes,
    "peak over SGD": state_bytes,
    "factor traffic": factor_traffic,
    "inverse traffic": inverse_traffic,
}


def run(setting: Setting, is_quick: bool) -> list[dict[str, Any]]:
    """Measures all axes.

    Returns:
        For each axis and quantity the "sizes" and "values" (seconds or bytes),
        "exponent" and "counted_exponent".
    """
    growth = []
    for axis in AXES:
        sizes = axis.sizes[: axis.quick] if is_quick else axis.sizes
        points, counted = [], []
        for number in sizes:
            model, changes = axis.make(number)
            own = dataclasses.replace(setting, **changes)
            print(f"{axis.name} {number}", file=sys.stderr, flush=True)
            points.append(measure_point(model, own))
            shape = mlp_size(model)
            assert shape is not None
            size = Size(*shape, own.batch, own.workers)
            counted.append({name: COUNTS[name](size) for name in COUNTS})
        growth += [
            {
                "axis": axis.name,
                "quantity": name,
                "sizes": list(sizes),
                "values": [point[name] for point in points],
                "exponent": exponent(sizes, [p[name] for p in points]),
                "counted_exponent": exponent(sizes, [c[name] for c in counted]),
            }
            for name in COUNTS
            if any(point[name] for point in points)  # no traffic of one
        ]
    return growth


def measure_point(model: str, setting: Setting) -> dict[str, float]:
    """Times the kinds of step of one model, in seconds; and bytes."""
    base = Job(model, BASE, setting)
    point = {"SGD step": _typical(base, STEPS["plain"])}
    base_peak = base.facts()["peak_bytes"]
    base.close()
    job = Job(model, KFAC, setting)
    for kind, intervals in KINDS.items():
        job.set_intervals(*intervals)
        point[f"{kind} step"] = _typical(job, STEPS[kind])
    facts = job.facts()
    job.close()
    traffic = facts.get("communication_bytes", {})
    return point | {
        "first step": job.first_step["cpu_seconds"],
        "state": facts["state_bytes"],
        "peak over SGD": facts["peak_bytes"] - base_peak,
        "factor traffic": sum(traffic.get("factor", {}).values()),
        "inverse traffic": sum(traffic.get("inverse", {}).values()),
    }


def _typical(job: Job, steps: int) -> float:
    return statistics.median(seconds for seconds, _ in job.run(steps))


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """Slope over the largest sizes on logarithmic axes.

    None if fewer than two of them have a value above 0.
    """
    pairs = [
        (math.log(size), math.log(value))
        for size, value in list(zip(sizes, values, strict=True))[-FITTED:]
        if value > 0
    ]
    if len(pairs) < 2:
        return None
    x, y = zip(*pairs, strict=True)
    return statistics.linear_regression(x, y).slope
