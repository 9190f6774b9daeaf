"""Bad decompositions and factors in jobs of several workers."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import workers_unsound
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tests.support.weights import assert_same_bits

JOBS = Jobs(workers_unsound)
CASES: dict[str, dict[str, Any]] = {}
HYBRID = {"distribution": "hybrid_opt"}
for name_, slow_, kwargs_ in [
    ("two: mem_opt", False, {"distribution": "mem_opt"}),
    ("two: comm_opt", True, {"distribution": "comm_opt"}),
    ("two: dp_kfac", True, {"distribution": "dp_kfac"}),
    ("two: eigen", True, {"distribution": "mem_opt", "solver": "eigen"}),
    ("two: rows", True, {"model": "wide"}),
    ("four: hybrid_opt", True, HYBRID),
    ("four: mem_opt", True, {"distribution": "mem_opt"}),
    ("mirrored: mem_opt", True, {"distribution": "mem_opt"}),
]:
    what_ = "decomposition"
    if kwargs_.get("model") == "wide":
        kwargs_["path"] = "second"
    CASES[name_] = kwargs_ = {
        "inverse_update_interval": 100,
        "factor_update_interval": 100,
        **kwargs_,
    }
    JOBS.add(name_, "spoil", what_, slow=slow_, **kwargs_)
# Factors have one owner each, whatever is done with their decompositions.
FACTORS = ("two: dp_kfac", "two: rows", "four: hybrid_opt", "mirrored: mem_opt")
for name_ in FACTORS:
    JOBS.add(
        f"{name_}, factor",
        "spoil",
        "factor",
        slow=name_ != "two: dp_kfac",
        **(CASES[name_] | {"factor_update_interval": 1}),
    )

Results = Callable[[str], list[Mapping[str, Any]]]


@pytest.fixture
def results(pool: Pool) -> Results:
    return functools.partial(JOBS.results, pool)


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_one_decision_everywhere(results: Results, name: str) -> None:
    """No worker hangs, weights are the same bits and near what they were."""
    workers = results(name)
    assert_same_bits(workers)
    for worker in workers:
        assert worker["iterations"] == workers_unsound.STEPS
        assert max(worker["moves"]) < 1
        for counts in worker["counts"]:
            plain = dict(zip(worker["paths"], counts["plain"], strict=True))
            for path, number in plain.items():
                assert number == path.endswith(
                    CASES[name].get("path", "hidden")
                )


@pytest.mark.parametrize("name", JOBS.params(f"{n}, factor" for n in FACTORS))
def test_factors_heal(results: Results, name: str) -> None:
    """Where they are kept; nobody ever uses a plain gradient."""
    workers = results(name)
    assert_same_bits(workers)
    counts = [c for worker in workers for c in worker["counts"]]
    assert sum(sum(c["dropped"]) for c in counts) >= 1
    assert {max(c["dropped"]) for c in counts} <= {0, 1}
    assert not any(any(c["plain"]) for c in counts)
    assert all(np.isfinite(w).all() for o in workers for w in o["weights"])
    # Who does not keep them knows of it as well.
    (path,) = {
        path
        for worker in workers
        for c in worker["counts"]
        for path, n in zip(worker["paths"], c["dropped"], strict=True)
        if n
    }
    for worker in workers:
        assert worker["events"] == {f"factors dropped of {path}": 1}
