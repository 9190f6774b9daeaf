"""The cost model against steps that are measured on this machine."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import tensorflow as tf

import tfkfac
from benchmarks.jobs import Setting
from benchmarks.keras_models import build
from benchmarks.measurement import measure
from benchmarks.phases import Mix
from benchmarks.variants import parse
from planning.cost import Machine, compare, measure_worker
from tfkfac.kfac.placement import turns_due

BATCH = 128
SOLVERS = ("inverse", "eigen")
MIX = Mix(5, 20)
KINDS = ("plain", "factor", "inverse")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A kind of step of a model with a solver, in milliseconds."""

    model: str
    solver: str
    kind: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """By which part the prediction is off."""
        return self.predicted / self.measured - 1


def measured_machine() -> Machine:
    """This machine as the only worker."""
    return Machine.of(
        **measure_worker(time.process_time), bandwidth=1.0, latency=0.0
    )


def verify(models: Sequence[str], rounds: int) -> list[Comparison]:
    """Predicts and measures steps of K-FAC, on one thread.

    Steps are measured in processor time. What is predicted is what K-FAC adds
    to the step of SGD that is measured beside it.

    Args:
        models: Names of models of the benchmark.
        rounds: How often the intervals are run.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    machine = measured_machine()
    names = ["sgd", *(f"kfac-{solver}" for solver in SOLVERS)]
    variants = [parse(name) for name in names]
    setting = Setting(batch=BATCH, threads=1)
    found = []
    for model in models:
        rows = measure(model, variants, setting, [MIX], rounds, MIX.period)
        phases = [row["mixes"][str(MIX)]["cpu_phases_ms"] for row in rows]
        first_order = median(phases[0])
        for solver, times in zip(SOLVERS, phases[1:], strict=True):
            found += _compare(model, solver, times, first_order, machine)
    return found


def _compare(
    name: str,
    solver: str,
    times: Sequence[float],
    first_order: float,
    machine: Machine,
) -> list[Comparison]:
    optimizer: Any = tfkfac.KFAC(solver=solver).attach(build(name))
    estimates = compare(
        optimizer,
        machine,
        1,
        BATCH,
        solvers=[solver],
        first_order=first_order / 1e3,
    )
    (one,) = (e for e in estimates if e.candidate.distribution == "comm_opt")
    turns = optimizer.method.placement.turns
    measured = kinds_of(times, turns)
    # Turns are of about the same length.
    inverses = 1e3 * one.stages["decompose"] / (max(turns) + 1)
    factors = 1e3 * (one.factor - one.plain)
    both = max(turns) == 0  # the only turn comes with the factors
    predicted = {
        "plain": 1e3 * one.plain,
        "factor": 1e3 * one.plain + factors,
        "inverse": 1e3 * one.plain + inverses + both * factors,
    }
    return [
        Comparison(name, solver, kind, measured[kind], predicted[kind])
        for kind in KINDS
    ]


def kinds_of(
    times: Sequence[float], turns: Sequence[int]
) -> Mapping[str, float]:
    """Times of an interval's steps by what was due."""
    due: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for phase, milliseconds in enumerate(times):
        clock = tf.constant(phase, tf.int64)
        factor, inverse = (
            tf.constant(i, tf.int64) for i in (MIX.factor, MIX.inverse)
        )
        if any(turns_due(max(turns) + 1, inverse, factor, clock)):
            due["inverse"].append(milliseconds)
        else:
            kind = "plain" if phase % MIX.factor else "factor"
            due[kind].append(milliseconds)
    return {
        "plain": median(due["plain"]),
        "factor": median(due["factor"]),
        "inverse": fmean(due["inverse"]),
    }
