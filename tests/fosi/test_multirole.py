"""MR-DHO2: accelerators estimate the curvature while workers train.

In float64, trainings are compared with the NumPy program, which has the same
schedule in one process.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tfkfac
from tests.support.cluster import SHAPES
from tests.support.fosi_reference import Fosi, Network, mlp
from tests.support.fosi_training import reference, train
from tests.support.marks import with_slow
from tests.support.reference import Array
from tests.support.training import (
    FEEDS,
    HIDDEN,
    SIZE,
    Result,
    Training,
    distance,
    shares,
)

NAN = float("nan")


def accelerated(
    layout: str,
    final_update: str,
    inner: str = "sgd",
    fraction: float = 0.5,
    **fields: Any,
) -> Training:
    """Estimations begin at updates 2, 5 and 8, a third of them in each step.

    Their results are used from update 5 and 8 on.
    """
    options = {
        "layout": layout,
        "final_update": final_update,
        "accelerator_fraction": fraction,
        "update_interval": 3,
        "warmup_steps": 2,
        "lanczos_steps": SIZE,
    }
    return Training("FOSI", "network", inner, options=options, **fields)


SLOW = {
    "four: rows, stale": accelerated("rows", "stale", "adam"),
    # The interval is shorter from update 3 on, so that the estimation of update
    # 2 is not done at its end, and longer from update 5 on.
    "two: columns, stale, intervals": accelerated(
        "columns",
        "stale",
        changes={3: {"update_interval": 2}, 5: {"update_interval": 4}},
    ),
    # An estimation begins in step 5. If the step is skipped, the accelerators
    # still use its batch.
    "two: rows, stale, NaN of a worker": accelerated(
        "rows", "stale", faults=((5, 0, NAN),)
    ),
    "two: rows, stale, NaN of an accelerator": accelerated(
        "rows", "stale", faults=((5, 1, NAN),)
    ),
    "four: rows, paper": accelerated("rows", "paper", fraction=0.25),
}
CASES = {"two: columns, paper": accelerated("columns", "paper")} | SLOW


def replicas_of(name: str) -> int:
    shape = SHAPES[name.partition(":")[0]]
    return shape.workers * shape.devices


def count_workers(name: str) -> int:
    count = replicas_of(name)
    return count - round(CASES[name].options["accelerator_fraction"] * count)


def by_rank(processes: list[Result], key: str) -> list[tuple[int, Any]]:
    """Return pairs of rank and value of every replica."""
    return [
        (rank, value)
        for process in processes
        for rank, value in zip(process["ranks"], process[key], strict=True)
    ]


def flat(weights: list[Array]) -> list[Array]:
    return [np.concatenate([np.ravel(w) for w in weights])]


@pytest.mark.parametrize("name", with_slow(CASES, *SLOW))
def test_training(on_workers: Any, name: str) -> None:
    processes = on_workers(name.partition(":")[0], train, CASES[name], 2)
    replicas, workers = replicas_of(name), count_workers(name)
    program, path = reference(
        CASES[name], replicas, range(workers), range(workers, replicas)
    )
    check_weights(name, processes, program, path)
    if not CASES[name].faults:
        check_metrics(name, processes, path)
    for process in processes:
        check_state(name, process)


def check_weights(
    name: str, processes: list[Result], program: Fosi, path: Array
) -> None:
    """Weights equal the program's; replicas are equal bit for bit."""
    assert program.values is not None
    workers = count_workers(name)
    is_blind, is_bad = "NaN of an acc" in name, "NaN" in name
    travelled = distance([path[-1]], [path[0]])
    assert travelled > 0.1
    for process in processes:
        away = distance(flat(process["weights"]), [path[-1]])
        assert away <= 1e-7 * travelled
        skipped = is_bad and not is_blind
        assert process["iterations"] == len(path) - 1 - skipped
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
        error = np.abs(values - program.values).max()
        assert error <= 1e-7 * np.abs(program.values).max()
    for key, want in [("failures", is_blind), ("skipped", is_bad - is_blind)]:
        for rank, count in by_rank(processes, key):
            assert count == (want if rank < workers else 0)


def check_metrics(name: str, processes: list[Result], path: Array) -> None:
    """Metrics are means over all replicas' rows at their step's weights."""
    x, y = CASES[name].data
    steps = [
        [row for rows in step for row in rows]
        for step in shares(FEEDS["uneven"], replicas_of(name))
    ]

    def means(pairs: Iterator[tuple[Array, list[int]]]) -> dict[str, Any]:
        values = [
            (batch.losses(w), batch.hits(w))
            for w, rows in pairs
            for batch in [Network(x[rows], y[rows], HIDDEN)]
        ]
        loss, accuracy = (
            np.concatenate(column).mean()
            for column in zip(*values, strict=True)
        )
        return {"loss": pytest.approx(loss, 1e-6), "accuracy": accuracy}

    for process in processes:
        assert process["logs"] == means(zip(path, steps, strict=False))
        end = ((path[-1], rows) for rows in steps[:2])
        assert process["evaluation"] == means(end)


def check_state(name: str, process: Result) -> None:
    """Workers store directions, accelerators basis and weights."""
    options = CASES[name].options
    replicas, workers = replicas_of(name), count_workers(name)
    vector, is_paper = 8 * SIZE, options["final_update"] == "paper"
    shape: Any = (3, -(-SIZE // workers))
    if options["layout"] == "columns":
        shape = (-(-3 // workers), SIZE)
    kept = process["state_bytes"]
    assert "the first" not in process["summary"]
    shapes = [shape if r < workers else None for r in process["ranks"]]
    assert process["shapes"] == shapes
    assert kept["counters"] == 8 * (6 + 1)
    plain, moved = (
        process["communication_bytes"][kind] for kind in ("plain", "estimation")
    )
    if process["ranks"][0] < workers:
        assert kept["basis"] == 0
        assert kept["directions"] >= 8 * np.prod(shape)
        assert kept["copies"] == 2 * vector * is_paper
        assert moved["lanczos"] == moved["weights"] == 0
        assert moved["directions"] > 0
        if is_paper:
            nothing = dict.fromkeys(moved, 0)
            assert plain == nothing | {"gradients": moved["gradients"]}
    else:
        length = -(-SIZE // (replicas - workers))
        assert kept["basis"] >= 8 * SIZE * length
        assert kept["directions"] == 0
        assert kept["copies"] == vector
        assert moved["gradients"] == moved["projections"] == 0
        assert moved["weights"] == vector
        assert moved["directions"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["four"])
def test_synchronized_moments(on_workers: Any, where: str) -> None:
    """Batch normalization sums over the replicas of one role only."""
    norm = functools.partial(Training, "FOSI", "batch_norm", "plain")
    feed = FEEDS["even"][:5]
    case = norm(
        feed=feed, options={"accelerator_fraction": 0.5, "update_interval": 3}
    )
    trained = [[*step[:2], [], []] for step in feed]
    estimated = [*trained[:2], [[], [], *feed[2][2:]]]
    plain = train(norm(feed=trained, options={"warmup_steps": 9}))
    single = train(norm(feed=estimated))
    travelled = distance(plain["weights"], plain["start"])
    want = [*plain["weights"], *plain["statistics"]]
    for process in on_workers(where, train, case):
        got = [*process["weights"], *process["statistics"]]
        assert distance(got, want) <= 1e-9 * travelled
        if (values := process["ritz_values"][0]) is not None:
            np.testing.assert_allclose(values, single["spectrum"], rtol=1e-8)


def test_one_device_is_not_enough() -> None:
    """`compile` refuses accelerators on a single replica."""
    for fraction, missing in ((0.1, "accelerator"), (0.9, "worker")):
        message = f"no {missing}.*accelerator_fraction={fraction}"
        with pytest.raises(ValueError, match=message):
            mlp().compile(tfkfac.FOSI(accelerator_fraction=fraction), "mse")
