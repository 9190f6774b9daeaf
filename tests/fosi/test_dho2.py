"""DHO2: FOSI with directions divided among several workers.

In float64, a job on several workers equals the NumPy program, or a single
process, up to rounding. Differences are relative to the distance that the
weights moved.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import workers_fosi
from tests.support.cluster import Pool
from tests.support.jobs import Jobs, replicas_of
from tests.support.reference import Array
from tests.support.weights import assert_same_bits, distance
from tests.support.workers_fosi import DEFAULTS, SIZE, reference

Results = Callable[[str], list[Any]]

# -------------------------------------------------------------------- jobs
JOBS = Jobs(workers_fosi)
# Name: the arguments of `workers_fosi.train`.
CASES: dict[str, dict[str, Any]] = {}


def add(
    where: str,
    layout: str,
    model: str,
    inner: str,
    what: str = "",
    slow: bool = True,
    **kwargs: Any,
) -> None:
    parts = ", ".join(p for p in (layout, model, inner, what) if p)
    name = f"{where}: {parts}"
    CASES[name] = kwargs | {"layout": layout, "model": model, "inner": inner}
    JOBS.add(name, "train", slow=slow, **CASES[name])


def add_known(*args: Any, **kwargs: Any) -> None:
    """Add a job with exact directions, as in the reference."""
    add(*args, slow=False, lanczos_steps=SIZE, **kwargs)


# Worker 1 has no row in step 4, worker 0 none in step 6: both estimate.
add_known(
    "two", "rows", "network", "plain", "four", num_largest=3, num_smallest=1
)
# Step and worker of a batch of NaN.
add_known("two", "columns", "network", "adam", "NaN", poison=(5, 1))
# More workers than directions.
add_known(
    "two", "columns", "network", "sgd", "one", num_largest=1, num_smallest=0
)
add("two", "columns", "batch_norm", "plain", feed="even")
add("two", "rows", "text", "sgd")
add("two", "rows", "mlp", "accumulation, average, decay")
add("two", "columns", "mlp", "sgd", "eager", feed="some", eager=True)
add(
    "two",
    "rows",
    "mlp",
    "sgd",
    "changed numbers",
    changes={3: {"update_interval": 3, "alpha": 0.5}, 6: {"alpha": 0.125}},
)
# One estimation, a share of the run that `fit` tells, alpha that decays.
NOTHING = {"warmup_steps": None, "update_interval": None}
add("two", "rows", "mlp", "decaying", "defaults", **NOTHING)
add("mirrored", "rows", "batch_norm", "adam", feed="even")
# More steps than the batches have rows: what is random then is made orthogonal
# to most of the space, which takes another sum in a branch.
add("two", "rows", "mlp", "plain", "exhausted", lanczos_steps=120)

JOBS.add("two: told", "told")


@pytest.fixture
def results(pool: Pool) -> Results:
    """The results of a job by worker."""
    return functools.partial(JOBS.results, pool)


@functools.cache
def expected(name: str) -> tuple[list[Array], Array]:
    """Weights and Ritz values for all workers' rows as one batch."""
    kwargs = CASES[name] | {"layout": "rows"}
    if kwargs["model"] == "network":
        everyone = range(replicas_of(name))
        del kwargs["model"]
        program, path = reference(len(everyone), everyone, everyone, **kwargs)
        assert program.values is not None
        return [path[-1]], program.values
    kwargs.pop("eager", None)
    single = workers_fosi.train(None, **kwargs)
    return single["weights"], single["spectrum"]


def flat(weights: list[Array]) -> list[Array]:
    return [np.concatenate([np.ravel(w) for w in weights])]


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_training(results: Results, name: str) -> None:
    """Equals one process on the global batches; workers are bitwise equal."""
    workers, options = results(name), CASES[name]
    assert_same_bits(workers)
    weights, values = expected(name)
    travelled = distance(flat(weights), flat(workers[0]["start"]))
    assert travelled > 0.1
    bad = int("poison" in options)
    # Updates 2, 4, 6, 8; with changed numbers 2, 5, 8.
    updates, wanted = 10 - bad, 4
    if "accumulation" in name:  # two steps for an update
        updates, wanted = 5, 2
    elif "changes" in options:
        wanted = 3
    elif "defaults" in name:
        wanted = 1
    everyone = range(replicas_of(name))
    for worker in workers:
        away = distance(flat(worker["weights"]), flat(weights))
        assert away <= 1e-9 * travelled
        for own in worker["ritz_values"]:
            np.testing.assert_array_equal(own, workers[0]["spectrum"])
            off = np.abs(own - values).max()
            assert off <= 1e-8 * np.abs(values).max()
        if not bad:  # a NaN is not equal to itself
            assert worker["logs"] == workers[0]["logs"]
        assert set(worker["skipped"]) == {bad}
        assert worker["iterations"] == updates
        assert set(worker["estimations"]) == {wanted}
        assert set(worker["failures"]) == {0}
        assert f"Workers {', '.join(map(str, everyone))}" in worker["summary"]
        assert f"Layout {options['layout']}" in worker["summary"]


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_state_is_divided(results: Results, name: str) -> None:
    """Basis and directions are divided evenly, up to padding."""
    options = DEFAULTS | CASES[name]
    workers = replicas_of(name)
    count = options["num_largest"] + options["num_smallest"]
    for worker in results(name):
        size = sum(w.size for w in worker["weights"])
        slices = -(-size // workers)
        shape, own = (count, slices), count
        if options["layout"] == "columns":
            own = -(-count // workers)
            shape = own, size
        # Ritz values, the length of Newton steps, and momentum; with
        # accumulation, that of some steps; with plain SGD's momentum, its part.
        more = "accumulation" in name or options["inner"] in ("sgd", "decaying")
        numbers = count + 1 + own * (1 + more)
        assert set(worker["shapes"]) == {shape}
        basis = 8 * options["lanczos_steps"] * slices
        assert worker["state_bytes"] == {
            "basis": basis,
            "directions": 8 * (np.prod(shape) + numbers),
            "copies": 0,
            "counters": 48,
            "total": basis + 8 * (np.prod(shape) + numbers) + 48,
        }


def test_all_workers_use_one_warmup(results: Results) -> None:
    """All workers use worker 0's warm-up: 7.5 % of 40 steps."""
    assert results("two: told") == [[3], [3]]
