"""Measures variants side by side on one model."""

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.jobs import DiedError, Job, Setting
from benchmarks.phases import Mix, Phases
from benchmarks.task import UnavailableError
from benchmarks.variants import Variant

# What is measured of a variant on a model, as it goes to JSON.
Row = dict[str, Any]

WARM_UP = 5  # steps that are not counted, the first among them
LEAST_STEPS = 20  # of a round: short intervals are run several times


def measure(
    model: str,
    variants: Sequence[Variant],
    setting: Setting,
    mixes: Sequence[Mix],
    rounds: int,
    turn: int,
) -> list[Row]:
    """Times the variants in turns.

    All of them stand at the same phase of their intervals at any time, so
    that the load of the machine, which changes slowly, meets all alike.

    Args:
        model: The name of the model.
        variants: What to compare.
        setting: How they are started.
        mixes: The intervals of K-FAC, one after the other.
        rounds: How often the intervals of each mix are run.
        turn: Steps of a variant before it is the next one's turn.
    """
    with contextlib.ExitStack() as stack:
        rows, jobs = [], []
        for variant in variants:
            row, job = _start(model, variant, setting)
            rows.append(row)
            if job is not None:
                stack.callback(job.close)
                jobs.append((row, job))
        for row, job in jobs:
            started = job.run(WARM_UP - job.steps)
            row["start_ms"] = [1e3 * seconds for seconds, _ in started]
        for mix in mixes:
            _run(jobs, mix, rounds, turn)
        for row, job in jobs:
            row.update(job.facts())
    return compare(rows, variants)


def measure_first_steps(
    model: str, variants: Sequence[Variant], setting: Setting, rounds: int
) -> list[Row]:
    """Medians of the first steps of so many fresh processes each."""
    runs: list[list[Row]] = []
    for _ in range(rounds):
        runs.append([])
        for variant in variants:
            row, job = _start(model, variant, setting)
            runs[-1].append(row)
            if job is not None:
                row.update(job.facts())
                job.close()
    return compare(
        [_typical(same) for same in zip(*runs, strict=True)], variants
    )


def _typical(rows: Sequence[Row]) -> Row:
    """The first row with the median first step of all."""
    row = rows[0]
    if all("first_step" in other for other in rows):
        row["first_step"] = {
            key: statistics.median(other["first_step"][key] for other in rows)
            for key in row["first_step"]
        }
    return row


def _start(
    model: str, variant: Variant, setting: Setting
) -> tuple[Row, Job | None]:
    """A job after its first step; none, with a reason, if there cannot be."""
    row: Row = {"model": model, "variant": variant.text}
    try:
        job = Job(model, variant, setting)
    except (UnavailableError, DiedError) as error:
        kind = "error" if isinstance(error, DiedError) else "unavailable"
        row[kind] = str(error)
        print(f"{model} {variant.text}: {error}", file=sys.stderr, flush=True)
        return row, None
    row["first_step"] = job.first_step
    return row, job


def _run(
    jobs: Sequence[tuple[Row, Job]], mix: Mix, rounds: int, turn: int
) -> None:
    """Runs whole intervals of a mix and notes their cost."""
    steps = rounds * mix.period * max(1, -(-LEAST_STEPS // mix.period))
    firsts = [job.steps for _, job in jobs]
    times: list[list[tuple[float, float]]] = [[] for _ in jobs]
    for _, job in jobs:
        job.set_intervals(mix.factor, mix.inverse)
    load = os.getloadavg()[0]
    numbered = list(enumerate(jobs))
    for length in _turns(steps, turn):
        for number, (_, job) in numbered:
            times[number] += job.run(length)
        numbered.reverse()  # nobody is always behind the same one
    for (row, _), first, pairs in zip(jobs, firsts, times, strict=True):
        row.setdefault("mixes", {})[str(mix)] = _cost(mix, first, pairs) | {
            "load": [load, os.getloadavg()[0]]
        }


def _turns(steps: int, turn: int) -> Iterator[int]:
    """Lengths of the turns that make so many steps together."""
    for start in range(0, steps, turn):
        yield min(turn, steps - start)


def _cost(
    mix: Mix, first: int, pairs: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    wall, processor = (
        Phases.of(mix, first, [1e3 * seconds for seconds in column])
        for column in zip(*pairs, strict=True)
    )
    return {
        "steps": len(pairs),
        "mean_ms": wall.mean,
        "median_ms": wall.median,
        "longest_ms": wall.longest,
        "cpu_mean_ms": processor.mean,
        "kinds_ms": wall.kinds(),
        "phases_ms": list(wall.times),
        "cpu_phases_ms": list(processor.times),
    }


def compare(rows: list[Row], variants: Sequence[Variant]) -> list[Row]:
    """Adds ratios to the SGD of the same framework, where it was run too."""
    by_name = {row["variant"]: row for row in rows}
    for row in rows:
        base = by_name.get("sgd", {})
        for name, cost in row.get("mixes", {}).items():
            if other := base.get("mixes", {}).get(name):
                cost["ratio"] = cost["mean_ms"] / other["mean_ms"]
                cost["cpu_ratio"] = cost["cpu_mean_ms"] / other["cpu_mean_ms"]
        if "first_step" in row and "first_step" in base:
            own, others = row["first_step"], base["first_step"]
            row["first_step_cpu_ratio"] = (
                own["cpu_seconds"] / others["cpu_seconds"]
            )
        if "peak_bytes" in row and "peak_bytes" in base:
            row["extra_peak_bytes"] = row["peak_bytes"] - base["peak_bytes"]
    return rows
