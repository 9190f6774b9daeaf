"""Several workers compute the steps of a single process."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import workers_gauss
from tests.support.cluster import Pool
from tests.support.jobs import Jobs, replicas_of
from tests.support.weights import assert_same_bits, distance
from tfkfac.distributed.collectives import all_reduce_bytes

Results = Callable[[str], list[Any]]

JOBS = Jobs(workers_gauss)
CASES: dict[str, dict[str, Any]] = {}


def add(where: str, what: str, slow: bool = True, **kwargs: Any) -> None:
    CASES[f"{where}: {what}"] = kwargs
    JOBS.add(f"{where}: {what}", "train", slow=slow, **kwargs)


add("mirrored", "regression", False, model="regression")
add("two", "regression", model="regression")
add("two", "classes", model="small")
add("two", "NaN", model="small", poison=(5, 1))


@pytest.fixture
def results(pool: Pool) -> Results:
    return functools.partial(JOBS.results, pool)


_ALONE: dict[str, Mapping[str, Any]] = {}


def alone(name: str) -> Mapping[str, Any]:
    """Results of a single process on the same global batches."""
    kwargs = {"solve": "parameters"} | CASES[name]
    if "poison" in kwargs:
        kwargs["without"] = kwargs.pop("poison")[0]
    key = repr(kwargs)
    if key not in _ALONE:
        _ALONE[key] = workers_gauss.train(None, **kwargs)
    return _ALONE[key]


def common_values(step: Mapping[str, float]) -> dict[str, float]:
    """The entries of `last_step` that are equal on all workers."""
    return {k: v for k, v in step.items() if k != "residuals"}


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_steps(results: Results, name: str) -> None:
    """Weights, dampings and tries, also with empty batches of a worker."""
    single, workers = alone(name), results(name)
    assert_same_bits(workers)
    travelled = distance(single["weights"], single["start"])
    assert travelled > 0.5
    steps = [common_values(step) for step in workers[0]["steps"]]
    if "poison" in CASES[name]:  # skipped: `last_step` stays
        del steps[CASES[name]["poison"][0]]
    assert any(step["tries"] > 1 for step in steps)
    for got, want in zip(steps, single["steps"], strict=True):
        assert got == pytest.approx(common_values(want), rel=1e-6, abs=1e-12)
    for worker in workers:
        away = distance(worker["weights"], single["weights"])
        assert away <= 1e-10 * travelled
        assert list(map(common_values, worker["steps"])) == list(
            map(common_values, workers[0]["steps"])
        )
        assert set(worker["dampings"]) == set(workers[0]["dampings"])
        for previous in worker["previous"]:
            np.testing.assert_array_equal(previous, workers[0]["previous"][0])
        assert set(worker["skipped"]) == {int("poison" in CASES[name])}
        # J^T J and J^T r have n (n + 3) / 2 scalars.
        size = sum(w.size for w in worker["weights"])
        assert list(worker["bytes"]["plain"].values()) == [
            all_reduce_bytes(8 * n, replicas_of(name))
            for n in (size, size * (size + 1) // 2, 2, size)
        ]
