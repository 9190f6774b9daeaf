"""DHO2: FOSI whose directions are divided among several workers.

Most cases train in float64, where a job on several workers and a single
process differ by rounding.
Differences are measured against the distance that all weights travelled.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import workers_fosi
from tests.support.cluster import Pool
from tests.support.jobs import Jobs, replicas_of
from tests.support.weights import assert_same_bits, distance
from tests.support.workers_fosi import DEFAULTS, LARGE, MODELS
from tfkfac.distributed.collectives import all_reduce_bytes

Result = Mapping[str, Any]
Results = Callable[[str], list[Any]]

EXACT = 1e-9  # float64
SINGLE = 1e-5  # float32

# -------------------------------------------------------------------- jobs
JOBS = Jobs(workers_fosi)
# Name: the arguments of `workers_fosi.train`.
CASES: dict[str, dict[str, Any]] = {}
ONE = {"num_largest": 1, "num_smallest": 0}
# Two directions for each of two workers, one for each of four.
FOUR = {"num_largest": 3, "num_smallest": 1}


def add(
    where: str,
    layout: str,
    model: str,
    inner: str = "sgd",
    what: str = "",
    slow: bool = False,
    **kwargs: Any,
) -> None:
    parts = ", ".join(p for p in (layout, model, inner, what) if p)
    name = f"{where}: {parts}"
    CASES[name] = kwargs | {"layout": layout, "model": model, "inner": inner}
    JOBS.add(name, "train", slow=slow, **CASES[name])


# Worker 1 has no row in step 4, worker 0 none in step 6: both estimate.
add("two", "rows", "mlp", "plain", **FOUR)
add("two", "columns", "batch_norm", "plain", slow=True, feed="even")
add("two", "rows", "batch_norm", "sgd", "uneven moments", True, feed="some")
add("two", "rows", "text", "sgd", slow=True)
add("two", "rows", "mlp", "accumulation, average, decay", slow=True)
add("two", "columns", "mlp", "accumulation, clipvalue", slow=True)
add("two", "columns", "mlp", "global clipnorm, average", slow=True, **FOUR)
add("two", "rows", "plain_norm", slow=True, feed="some")
add("two", "rows", "mlp", "sgd", "float32", slow=True, dtype="float32")
add("two", "columns", "mlp", "sgd", "eager", True, feed="some", eager=True)
add(
    "two",
    "rows",
    "mlp",
    "sgd",
    "changed numbers",
    slow=True,
    changes={3: {"update_interval": 3, "alpha": 0.5}, 6: {"alpha": 0.125}},
    fits=[(2, 2), (1, 6)],
)
# One estimation, a share of the run that `fit` tells, alpha that decays.
NOTHING = {"warmup_steps": None, "update_interval": None}
add("two", "rows", "mlp", "decaying", "defaults", True, **NOTHING)
# Step and worker of a batch of NaN; without it, step 4 would estimate.
add("two", "rows", "mlp", "sgd", "NaN", slow=True, poison=(4, 0))
add("two", "columns", "mlp", "adam", "NaN", poison=(5, 1))
# More workers than directions.
add("four", "columns", "mlp", "sgd", "one direction", **ONE)
add("four", "columns", "batch_norm", "adam", slow=True, feed="even")
add("mirrored", "rows", "batch_norm", "adam", slow=True, feed="even")
add("mirrored", "columns", "text", "sgd", slow=True)

# More steps than the batches have rows: what is random then is made orthogonal
# to most of the space, which takes another sum in a branch.
add("two", "rows", "mlp", "plain", "exhausted", slow=True, lanczos_steps=120)

# What worker 0 and worker 1 say; the rest of the job is the same.
DISAGREEMENTS = {
    "two: other seed": ("seed", (0, 1)),
    "two: other layout": ("layout", ("rows", "columns")),
}
for where_ in ("two", "four"):
    for layout_ in ("rows", "columns"):
        JOBS.add(f"{where_}: traffic, {layout_}", "traffic", layout_)
JOBS.add("two: told", "told")
for name_, arguments_ in DISAGREEMENTS.items():
    is_slow_ = name_ != "two: other seed"
    JOBS.add(name_, "disagreement", *arguments_, slow=is_slow_)


@pytest.fixture
def results(pool: Pool) -> Results:
    """Gives the results of a job by worker."""
    return functools.partial(JOBS.results, pool)


def options_of(name: str) -> dict[str, Any]:
    return CASES[name]


def directions_of(name: str) -> int:
    options = DEFAULTS | options_of(name)
    return options["num_largest"] + options["num_smallest"]


def tolerance_of(name: str) -> float:
    return SINGLE if "dtype" in options_of(name) else EXACT


@functools.cache
def size_of(model: str) -> int:
    return MODELS[model]().count_params() - 2 * 2 * model.endswith("norm")


# ---------------------------------------------------------- single process
_ALONE: dict[str, Result] = {}


def alone(name: str) -> Result:
    """What a single process, this one, gets on the same global batches."""
    kwargs = {k: v for k, v in options_of(name).items() if k != "layout"}
    if "poison" in kwargs:
        # All leave out that step, whoever had the NaN.
        kwargs["without"] = kwargs.pop("poison")[0]
    kwargs.pop("eager", None)
    key = repr(sorted(kwargs.items()))
    if key not in _ALONE:
        _ALONE[key] = workers_fosi.train(None, **kwargs)
    return _ALONE[key]


# ----------------------------------------------------------------- results
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_same_bits_everywhere(results: Results, name: str) -> None:
    """Weights, the inner optimizer's slots, Ritz values and metrics."""
    workers = results(name)
    if options_of(name)["model"] == "plain_norm":
        # Each worker has the moving statistics of its own rows.
        weights = [w["weights"] for w in workers]
        for other in weights[1:]:
            for got, want in zip(other, weights[0], strict=True):
                np.testing.assert_array_equal(got, want)
    else:
        assert_same_bits(workers)
    values = [v for w in workers for v in w["ritz_values"]]
    for worker, own in zip(workers, values[:: len(values)], strict=False):
        np.testing.assert_array_equal(worker["spectrum"], own)
    if "poison" not in options_of(name):  # a NaN is not equal to itself
        for worker in workers:
            assert worker["history"] == workers[0]["history"]
    for value in values:
        assert value.shape == (directions_of(name),)
        assert value.any()
        np.testing.assert_array_equal(value, values[0])


def test_all_workers_hear_the_same(results: Results) -> None:
    """That is 7.5 % of the first one's 40 steps."""
    assert results("two: told") == [[3], [3]]


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_counts(results: Results, name: str) -> None:
    workers = results(name)
    options = options_of(name)
    bad = int("poison" in options)
    assert {n for w in workers for n in w["skipped"]} == {bad}
    # Updates 2, 4, 6, 8; with changed numbers 2, 5, 8.
    updates, wanted = 10 - bad, {4}
    if "accumulation" in name:  # two steps for an update
        updates, wanted = 5, {2}
    elif "changes" in options:
        wanted = {3}
    elif "defaults" in name:
        wanted = {1}
    assert {w["iterations"] for w in workers} == {updates}
    assert {n for w in workers for n in w["estimations"]} == wanted
    assert {n for w in workers for n in w["failures"]} == {0}


@pytest.mark.parametrize(
    "name",
    JOBS.params(n for n in CASES if options_of(n)["model"] != "plain_norm"),
)
def test_equals_one_process(results: Results, name: str) -> None:
    """On the same global batches, of which some workers may have no row."""
    single = alone(name)
    tolerance = tolerance_of(name)
    travelled = distance(single["weights"], single["start"])
    assert travelled > 0.1
    for worker in results(name):
        np.testing.assert_equal(worker["start"], single["start"])
        away = distance(worker["weights"], single["weights"])
        assert away <= tolerance * travelled
        scale = np.abs(single["spectrum"]).max()
        for values in worker["ritz_values"]:
            off = np.abs(values - single["spectrum"]).max()
            assert off <= 10 * tolerance * scale


# ------------------------------------------------------------------- state
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_state_is_divided(results: Results, name: str) -> None:
    """The basis and the directions, up to padding."""
    options = DEFAULTS | options_of(name)
    size, count = size_of(options["model"]), directions_of(name)
    workers = replicas_of(name)
    item = 4 if options.get("dtype") == "float32" else 8
    slices, columns = -(-size // workers), -(-count // workers)
    shape, own = (count, slices), count
    if options["layout"] == "columns":
        shape, own = (columns, size), columns
    # Ritz values, the length of Newton steps, and momentum; with accumulation,
    # that of some steps; with plain SGD's momentum, its part.
    more = "accumulation" in name or options["inner"] in ("sgd", "decaying")
    numbers = count + 1 + own * (1 + more)
    for worker in results(name):
        assert set(worker["shapes"]) == {shape}
        basis = item * options["lanczos_steps"] * slices
        assert worker["state_bytes"] == {
            "basis": basis,
            "directions": item * (np.prod(shape) + numbers),
            "copies": 0,
            "counters": 48,
            "total": worker["kept_bytes"] + basis,
        }


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_reports(results: Results, name: str) -> None:
    for worker in results(name):
        everyone = ", ".join(map(str, range(replicas_of(name))))
        lines = [" ".join(li.split()) for li in worker["summary"].splitlines()]
        assert f"Workers {everyone}" in lines
        assert f"Layout {options_of(name)['layout']}" in lines
        np.testing.assert_array_equal(
            worker["idle_share"], np.zeros(replicas_of(name))
        )


# ----------------------------------------------------------- communication
@pytest.mark.parametrize(
    "name", JOBS.params(f"{where}: traffic, rows" for where in ("two", "four"))
)
def test_traffic_of_a_large_model(results: Results, name: str) -> None:
    """Slices of all directions move a third of what whole ones do."""
    workers = replicas_of(name)
    rows, columns = results(name), results(name.replace("rows", "columns"))
    for ours, published in zip(rows, columns, strict=True):
        for kind in ("plain", "estimation"):
            assert (
                ours[kind]["projections"]
                <= 0.34 * published[kind]["projections"]
            )
        assert (
            ours["estimation"]["directions"]
            < published["estimation"]["directions"]
        )
        for kinds in (ours, published):
            assert kinds["warmup"]["projections"] == 0
            assert kinds["plain"]["lanczos"] == 0
            assert kinds["plain"]["gradients"] == all_reduce_bytes(
                4 * LARGE, workers
            )


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", JOBS.params(DISAGREEMENTS))
def test_other_arguments_are_refused(results: Results, name: str) -> None:
    argument, values = DISAGREEMENTS[name]
    for message, updates in results(name):
        assert f"argument {argument}: {values[0]!r} on worker 0" in message
        assert f"{values[1]!r} on worker 1" in message
        assert updates == 0
