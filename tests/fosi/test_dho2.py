"""DHO2: FOSI with directions divided among several workers.

In float64, a training on several workers equals the NumPy program, or a single
process, up to rounding. Differences are relative to the distance that the
weights moved.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support import training
from tests.support.fosi_training import reference, train
from tests.support.marks import with_slow
from tests.support.reference import Array
from tests.support.strategies import local_ranks
from tests.support.training import (
    FOSI_DEFAULTS,
    SIZE,
    Result,
    Training,
    assert_same_bits,
    distance,
)

WORKERS = 2  # or replicas of one process


def fosi(layout: str, model: str, inner: str, **kwargs: Any) -> Training:
    fields = {
        name: kwargs.pop(name)
        for name in ("faults", "changes", "eager", "feed")
        if name in kwargs
    }
    options = {"layout": layout, **kwargs}
    return Training("FOSI", model, inner, options=options, **fields)


# Those of "network" have exact directions, as in the reference.
EXACT = {
    # Worker 1 has no row in step 4, worker 0 none in step 6: both estimate.
    "two: rows": fosi(
        "rows",
        "network",
        "plain",
        num_largest=3,
        num_smallest=1,
        lanczos_steps=SIZE,
    ),
    "two: columns, NaN": fosi(
        "columns",
        "network",
        "adam",
        lanczos_steps=SIZE,
        faults=((5, 1, float("nan")),),
    ),
    # More workers than directions.
    "two: columns, one direction": fosi(
        "columns",
        "network",
        "sgd",
        num_largest=1,
        num_smallest=0,
        lanczos_steps=SIZE,
    ),
}
SLOW = {
    "two: rows, accumulation": fosi(
        "rows", "regression", "accumulation, average, decay"
    ),
    "two: columns, eager, changes": fosi(
        "columns",
        "small",
        "sgd",
        feed="some",
        eager=True,
        changes={3: {"update_interval": 3, "alpha": 0.5}, 6: {"alpha": 0.125}},
    ),
    # One estimation, in a share of the steps of `fit`; alpha decays.
    "two: rows, defaults": fosi(
        "rows", "small", "decaying", warmup_steps=None, update_interval=None
    ),
    "mirrored: rows": fosi("rows", "batch_norm", "adam", feed="even"),
    # More Lanczos steps than rows of a batch: random vectors are
    # orthogonalized, with another sum in a branch.
    "two: rows, exhausted": fosi("rows", "small", "plain", lanczos_steps=120),
}
CASES = EXACT | SLOW


def expected(name: str) -> tuple[list[Array], Array]:
    """Return weights and Ritz values with the rows of all workers."""
    case = CASES[name]
    if name in EXACT:
        program, path = reference(case, WORKERS, range(2), range(2))
        assert program.values is not None
        return [path[-1]], program.values
    options = {**case.options, "layout": "rows"}
    single = train(dataclasses.replace(case, options=options, eager=False))
    return single["weights"], single["spectrum"]


def flat(weights: list[Array]) -> list[Array]:
    return [np.concatenate([np.ravel(w) for w in weights])]


@pytest.mark.parametrize(
    "name", with_slow(CASES, "two: columns, one direction", *SLOW)
)
def test_training(on_workers: Any, name: str) -> None:
    """Workers equal one process on the global batches, and each other."""
    case = CASES[name]
    workers = on_workers(name.partition(":")[0], train, case)
    assert_same_bits(workers)
    weights, values = expected(name)
    travelled = distance(flat(weights), flat(workers[0]["start"]))
    assert travelled > 0.1
    bad = len(case.faults)
    # Updates 2, 4, 6, 8; with changes 2, 5, 8.
    updates, estimations = 10 - bad, 4
    if "accumulation" in name:  # two steps for an update
        updates, estimations = 5, 2
    elif "changes" in name:
        estimations = 3
    elif "defaults" in name:
        estimations = 1
    for worker in workers:
        away = distance(flat(worker["weights"]), flat(weights))
        assert away <= 1e-9 * travelled
        for local in worker["ritz_values"]:
            np.testing.assert_array_equal(local, workers[0]["spectrum"])
            error = np.abs(local - values).max()
            assert error <= 1e-8 * np.abs(values).max()
        np.testing.assert_equal(worker["logs"], workers[0]["logs"])
        assert set(worker["skipped"]) == {bad}
        assert worker["iterations"] == updates
        assert set(worker["estimations"]) == {estimations}
        assert set(worker["failures"]) == {0}
        summary = " ".join(worker["summary"].split())
        assert "Workers 0, 1" in summary
        assert f"Layout {case.options['layout']}" in summary
        check_state(case, worker)


def check_state(case: Training, worker: Result) -> None:
    """Basis and directions are divided evenly, up to padding."""
    options = FOSI_DEFAULTS | dict(case.options)
    count = options["num_largest"] + options["num_smallest"]
    size = sum(w.size for w in worker["weights"])
    length = -(-size // WORKERS)
    shape, local = (count, length), count
    if options["layout"] == "columns":
        local = -(-count // WORKERS)
        shape = local, size
    # Ritz values, the length of Newton steps, and momentum; with accumulation
    # or plain SGD's momentum, one more vector.
    more = case.inner in ("sgd", "decaying") or "accumulation" in case.inner
    basis = 8 * options["lanczos_steps"] * length
    directions = 8 * (np.prod(shape) + count + 1 + local * (1 + more))
    assert set(worker["shapes"]) == {shape}
    assert worker["state_bytes"] == {
        "basis": basis,
        "directions": directions,
        "copies": 0,
        "counters": 48,
        "total": basis + directions + 48,
    }


def warmup() -> list[int]:
    """Return the warm-up of each replica, for other lengths on workers."""
    case = fosi("rows", "small", "sgd", warmup_steps=None)
    optimizer = training.build(case).optimizer
    optimizer.method.set_run_length(40 * (1 + local_ranks()[0]))
    return [int(state.warmup) for state in optimizer.method.states]


def test_all_workers_use_one_warmup(on_workers: Any) -> None:
    """All workers use worker 0's warm-up: 7.5 % of 40 steps."""
    assert on_workers("two", warmup) == [[3], [3]]
