"""MR-DHO2: accelerators estimate the curvature while workers train.

Jobs are compared with the NumPy program, which runs the same schedule
sequentially, in float64.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tfkfac
from tests.support import workers_fosi
from tests.support.cluster import Pool
from tests.support.fosi_reference import Fosi, Network, data, mlp
from tests.support.jobs import Jobs, replicas_of
from tests.support.reference import Array
from tests.support.schedules import Formula
from tests.support.weights import distance
from tests.support.worker_parts import FEEDS, shares
from tests.support.workers_fosi import DEFAULTS, HIDDEN, SIZE, reference

Results = Callable[[str], list[Any]]

# -------------------------------------------------------------------- jobs
JOBS = Jobs(workers_fosi)
# Name: the arguments of `workers_fosi.train`.
CASES: dict[str, dict[str, Any]] = {}
# Estimations begin at updates 2, 5 and 8, a third of them beside each step;
# their results are in use from update 5 and 8 on.
OPTIONS = {
    "model": "network",
    "accelerator_fraction": 0.5,
    "update_interval": 3,
    "warmup_steps": 2,
    "lanczos_steps": SIZE,
    "evaluated": 2,
}


def add(
    where: str,
    layout: str,
    final: str,
    inner: str,
    what: str = "",
    slow: bool = True,
    **kwargs: Any,
) -> None:
    name = f"{where}: {', '.join(filter(None, (layout, final, inner, what)))}"
    kwargs |= {"layout": layout, "final_update": final, "inner": inner}
    CASES[name] = OPTIONS | kwargs
    JOBS.add(name, "train", slow=slow, **CASES[name])


add("two", "columns", "paper", "sgd", slow=False)
add("four", "rows", "stale", "adam")
add("two", "rows", "stale", "sgd")
# The estimation that began at update 2 is not done at the end of the interval,
# which is shorter from update 3 on, and longer from update 5 on.
changes_ = {3: {"update_interval": 2}, 5: {"update_interval": 4}}
add("two", "columns", "stale", "sgd", "changed interval", changes=changes_)
# Step and replica of a batch of NaN. An estimation begins in step 5; if it is
# skipped, then the accelerators still use its batch.
add("two", "rows", "stale", "sgd", "NaN at begin", poison=(5, 0))
add("two", "rows", "stale", "sgd", "blind", poison=(5, 1))
for fraction_, layout_, final_ in [
    (0.25, "rows", "paper"),
    (0.75, "columns", "stale"),
]:
    what_ = f"{fraction_} accelerators"
    add("four", layout_, final_, "sgd", what_, accelerator_fraction=fraction_)
add("mirrored", "columns", "paper", "adam")

# Synchronised moments are of the workers, or of the accelerators.
NORM: dict[str, Any] = {"model": "batch_norm", "inner": "plain"}
for where_ in ("four", "mirrored"):
    JOBS.add(
        f"{where_}: moments",
        "train",
        slow=True,
        feed=FEEDS["even"]()[:5],
        **NORM,
        accelerator_fraction=0.5,
        update_interval=3,
    )


@pytest.fixture
def results(pool: Pool) -> Results:
    """The results of a job by process."""
    return functools.partial(JOBS.results, pool)


def count_workers(name: str) -> int:
    count = replicas_of(name)
    return count - round(CASES[name]["accelerator_fraction"] * count)


@functools.cache
def expected(name: str) -> tuple[Fosi, Array]:
    """The NumPy program, and the weights at the start and after each step."""
    replicas, workers = replicas_of(name), count_workers(name)
    kwargs = {k: v for k, v in CASES[name].items() if k != "model"}
    roles = range(workers), range(workers, replicas)
    return reference(replicas, *roles, **kwargs)


def by_rank(results: list[Any], what: str) -> list[tuple[int, Any]]:
    """Pairs of rank and value of every replica."""
    return [
        (rank, value)
        for process in results
        for rank, value in zip(process["ranks"], process[what], strict=True)
    ]


def flat(weights: list[Array]) -> list[Array]:
    return [np.concatenate([np.ravel(w) for w in weights])]


# ----------------------------------------------------------------- results
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_training(results: Results, name: str) -> None:
    """Weights equal the program's; replicas are bitwise equal."""
    program, path = expected(name)
    assert program.values is not None
    processes, workers = results(name), count_workers(name)
    blind, bad = "blind" in name, "poison" in CASES[name]
    travelled = distance([path[-1]], [path[0]])
    assert travelled > 0.1
    for process in processes:
        away = distance(flat(process["weights"]), [path[-1]])
        assert away <= 1e-7 * travelled
        assert process["iterations"] == len(path) - 1 - (bad and not blind)
    for _, variables in by_rank(processes, "variables"):
        for got, want in zip(
            variables, processes[0]["variables"][0], strict=True
        ):
            np.testing.assert_array_equal(got, want)
    for rank, values in by_rank(processes, "ritz_values"):
        if rank >= workers:  # accelerators keep none
            assert values is None
            continue
        np.testing.assert_array_equal(values, processes[0]["spectrum"])
        off = np.abs(values - program.values).max()
        assert off <= 1e-7 * np.abs(program.values).max()
    for what, want in [("failures", int(blind)), ("skipped", bad - blind)]:
        for rank, count in by_rank(processes, what):
            assert count == (want if rank < workers else 0)


@pytest.mark.parametrize(
    "name", JOBS.params(n for n in CASES if "poison" not in CASES[n])
)
def test_metrics(results: Results, name: str) -> None:
    """Metrics are means over all replicas' rows at their step's weights."""
    _, path = expected(name)
    x, y = data(160)
    steps = [
        [row for own in step for row in own]
        for step in shares(FEEDS["uneven"](), replicas_of(name))
    ]

    def means(pairs: Iterator[tuple[Array, list[int]]]) -> dict[str, Any]:
        made = [
            (batch.losses(w), batch.hits(w))
            for w, rows in pairs
            for batch in [Network(x[rows], y[rows], HIDDEN)]
        ]
        loss, accuracy = (
            np.concatenate(part).mean() for part in zip(*made, strict=True)
        )
        return {"loss": pytest.approx(loss, 1e-6), "accuracy": accuracy}

    for process in results(name):
        assert process["logs"] == means(zip(path, steps, strict=False))
        end = ((path[-1], rows) for rows in steps[:2])
        assert process["evaluation"] == means(end)


@pytest.mark.parametrize(
    "name", JOBS.params(["four: moments", "mirrored: moments"])
)
def test_synchronised_moments(results: Results, name: str) -> None:
    """Moments are summed over the replicas of one role only."""
    feed = FEEDS["even"]()
    trained = [[*step[:2], [], []] for step in feed]
    estimated = [*trained[:2], [[], [], *feed[2][2:]]]
    plain = workers_fosi.train(None, feed=trained[:5], warmup_steps=9, **NORM)
    single = workers_fosi.train(None, feed=estimated, **NORM)
    travelled = distance(plain["weights"], plain["start"])
    values = [*plain["weights"], *plain["statistics"]]
    for process in results(name):
        own = [*process["weights"], *process["statistics"]]
        assert distance(own, values) <= 1e-9 * travelled
        if (found := process["ritz_values"][0]) is not None:
            np.testing.assert_allclose(found, single["spectrum"], rtol=1e-8)


# ----------------------------------------------------------------- reports
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_reports(results: Results, name: str) -> None:
    """Workers store directions, accelerators basis and weights."""
    options = DEFAULTS | CASES[name]
    replicas, workers = replicas_of(name), count_workers(name)
    vector, paper = 8 * SIZE, options["final_update"] == "paper"
    shape: Any = (3, -(-SIZE // workers))
    if options["layout"] == "columns":
        shape = (-(-3 // workers), SIZE)
    for process in results(name):
        kept = process["state_bytes"]
        assert not any("the first" in line for line in process["summary"])
        shapes = [shape if r < workers else None for r in process["ranks"]]
        assert process["shapes"] == shapes
        assert kept["counters"] == 8 * (6 + 1)
        plain, moved = (
            process["communication_bytes"][kind]
            for kind in ("plain", "estimation")
        )
        if process["ranks"][0] < workers:
            assert kept["basis"] == 0
            assert kept["directions"] >= 8 * np.prod(shape)
            assert kept["copies"] == 2 * vector * paper
            assert moved["lanczos"] == moved["weights"] == 0
            assert moved["directions"] > 0
            if paper:
                nothing = dict.fromkeys(moved, 0)
                assert plain == nothing | {"gradients": moved["gradients"]}
        else:
            slices = -(-SIZE // (replicas - workers))
            assert kept["basis"] >= 8 * SIZE * slices
            assert kept["directions"] == 0
            assert kept["copies"] == vector
            assert moved["gradients"] == moved["projections"] == 0
            assert moved["weights"] == vector
            assert moved["directions"] == 0


def test_when_the_first_estimation_comes() -> None:
    """The first estimation ends with the first interval after the warm-up."""
    options: Any = {"accelerator_fraction": 0.5, "warmup_steps": 1200}
    known = tfkfac.FOSI(**options, update_interval=30).method
    assert known.first(0) == known.first(1229) == "the first after update 1,230"
    assert known.first(1230) == ""
    changing = tfkfac.FOSI(**options, update_interval=Formula(lambda t: 30))
    first = changing.method.first
    assert first(0) == first(1200) == "the first begins before update 1,201"
    assert first(1201) == ""


def test_one_device_is_not_enough() -> None:
    """`compile` refuses accelerators on a single replica."""
    for fraction, missing in ((0.1, "accelerator"), (0.9, "worker")):
        message = f"no {missing}.*accelerator_fraction={fraction}"
        with pytest.raises(ValueError, match=message):
            mlp().compile(tfkfac.FOSI(accelerator_fraction=fraction), "mse")
