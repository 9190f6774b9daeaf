"""FOSI on several workers: DHO2, and MR-DHO2 with accelerators.

In float64, a training on several replicas equals the NumPy program, or a single
process, up to rounding. Differences are relative to the distance that the
weights moved.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import tfkfac
from tests.support import fosi_reference, training
from tests.support.cluster import SHAPES
from tests.support.dtypes import floats
from tests.support.fosi_reference import Fosi, Network, mlp
from tests.support.marks import with_slow
from tests.support.reference import Array, adam, sgd
from tests.support.strategies import copies, local_ranks
from tests.support.training import (
    ADAM_RATE,
    BETAS,
    FEEDS,
    FOSI_DEFAULTS,
    HIDDEN,
    MOMENTUM,
    RATE,
    SIZE,
    Result,
    Training,
    assert_same_bits,
    distance,
    shares,
)

NAN = float("nan")
RULES = {
    "plain": sgd(RATE),
    "sgd": sgd(RATE, MOMENTUM),
    "adam": adam(ADAM_RATE, betas=BETAS),
}


def fosi(layout: str, model: str, inner: str, **kwargs: Any) -> Training:
    fields = {
        name: kwargs.pop(name)
        for name in ("faults", "changes", "feed")
        if name in kwargs
    }
    options = {"layout": layout, **kwargs}
    return Training("FOSI", model, inner, options=options, **fields)


# Those of "network" have exact directions, as in the program.
exact = functools.partial(fosi, model="network", lanczos_steps=SIZE)
# Estimations begin at updates 2, 5 and 8, a third of them in each step. Their
# results are used from update 5 and 8 on.
accelerated = functools.partial(
    exact,
    inner="sgd",
    accelerator_fraction=0.5,
    update_interval=3,
    warmup_steps=2,
)
stale = functools.partial(accelerated, final_update="stale")
paper = functools.partial(accelerated, final_update="paper")
CASES = {
    # Worker 1 has no row in step 4, worker 0 none in step 6: both estimate.
    "two: rows": exact("rows", inner="plain", num_largest=3, num_smallest=1),
    # More Lanczos steps than rows of a batch: random vectors are
    # orthogonalized, with another sum in a branch.
    "two: rows, exhausted": fosi("rows", "small", "plain", lanczos_steps=120),
    "two: columns, NaN": exact("columns", inner="adam", faults=((5, 1, NAN),)),
    "two: rows, accumulation": fosi(
        "rows", "regression", "accumulation, average, decay"
    ),
    "mirrored: rows": fosi("rows", "batch_norm", "adam", feed="even"),
    "two: columns, paper": paper("columns"),
    "four: rows, stale": stale("rows", inner="adam"),
    # The interval is shorter from update 3 on, so that the estimation of update
    # 2 is not done at its end, and longer from update 5 on.
    "two: columns, stale, intervals": stale(
        "columns",
        changes={3: {"update_interval": 2}, 5: {"update_interval": 4}},
    ),
    # An estimation begins in step 5. If the step is skipped, the accelerators
    # still use its batch.
    "two: rows, stale, NaN of a worker": stale("rows", faults=((5, 0, NAN),)),
    "two: rows, stale, NaN of an accelerator": stale(
        "rows", faults=((5, 1, NAN),)
    ),
}
QUICK = "two: rows", "two: columns, NaN", "two: columns, paper"


def replicas_of(name: str) -> int:
    shape = SHAPES[name.partition(":")[0]]
    return shape.workers * shape.devices


def count_workers(case: Training, replicas: int) -> int:
    """Number of replicas that train."""
    fraction = case.options.get("accelerator_fraction", 0)
    return replicas - round(fraction * replicas)


# -------------------------------------------------------------- on a worker
def train(case: Training) -> Result:
    """Train and describe the state."""
    model = training.build(case, metrics=["accuracy"])
    start = [v.numpy() for v in model.trainable_variables]
    logs = training.fit(model, case)
    optimizer = model.optimizer
    states = optimizer.method.states
    subspaces = [s.subspace for s in states]
    return training.describe(model) | {
        "start": start,
        "logs": {name: values[0] for name, values in logs.items()},
        "ranks": local_ranks(),
        "weights": [v.numpy() for v in model.trainable_variables],
        "statistics": [v.numpy() for v in model.non_trainable_variables],
        "variables": copies(model.variables),
        "estimations": [int(s.estimations) for s in states],
        "failures": [int(s.failures) for s in states],
        "ritz_values": [s and s.ritz_values.numpy() for s in subspaces],
        "shapes": [s and tuple(s.directions.shape) for s in subspaces],
        "spectrum": optimizer.spectrum(),
    }


# ------------------------------------------------------------------- results
def reference(case: Training, replicas: int) -> tuple[Fosi, Array]:
    """Return the NumPy program of a training of "network", and its path."""
    workers = count_workers(case, replicas)
    trainers = estimators = range(workers)
    if workers < replicas:
        estimators = range(workers, replicas)
    options = FOSI_DEFAULTS | dict(case.options)
    steps = shares(case.rows, replicas)
    ((step, bad, _),) = case.faults or ((-1, -1, 0.0),)
    intervals = [options["update_interval"]] * (len(steps) + 1)
    for begin, values in case.changes.items():
        intervals[begin:] = [values["update_interval"]] * len(intervals)
    program = Fosi(
        RULES[case.inner],
        options["num_largest"],
        options["num_smallest"],
        lambda t: options["alpha"],
        intervals.__getitem__,
        options["warmup_steps"],
        clip=1.0 if case.inner == "adam" else options["learning_rate_clip"],
        iterations=options["lanczos_steps"] if workers < replicas else 0,
        is_paper=options.get("final_update") == "paper",
        skipped={step} if bad in trainers else (),
    )

    def batch(ranks: Iterable[int]) -> Network | None:
        rows = [row for rank in ranks for row in steps[program.number][rank]]
        is_bad = program.number == step and bad in ranks
        return None if is_bad or not rows else Network(x[rows], y[rows], HIDDEN)

    def gradient(w: Array) -> Array:
        network = batch(trainers)
        return 0 * w if network is None else network.gradient(w)

    def hessian(w: Array) -> Array | None:
        network = batch(estimators)
        return None if network is None else network.hessian(w)

    with floats("float64"):
        x, y = case.data
        start = fosi_reference.flat(training.network())
    return program, program.run(gradient, hessian, start, len(steps))


def flat(weights: list[Array]) -> list[Array]:
    return [np.concatenate([np.ravel(w) for w in weights])]


def expected(name: str) -> tuple[Array, Array]:
    """Return the weights after each step, or the last step, and Ritz values."""
    case = CASES[name]
    if case.model == "network":
        program, path = reference(case, replicas_of(name))
        assert program.values is not None
        return path, program.values
    options = {**case.options, "layout": "rows"}
    single = train(dataclasses.replace(case, options=options))
    return np.stack(flat(single["weights"])), single["spectrum"]


def by_rank(processes: list[Result], key: str) -> list[tuple[int, Any]]:
    """Return pairs of rank and value of every replica."""
    return [
        (rank, value)
        for process in processes
        for rank, value in zip(process["ranks"], process[key], strict=True)
    ]


@pytest.mark.parametrize(
    "name", with_slow(CASES, *(name for name in CASES if name not in QUICK))
)
def test_training(on_workers: Any, name: str) -> None:
    """Replicas equal the reference, and each other bit for bit."""
    case, replicas = CASES[name], replicas_of(name)
    workers = count_workers(case, replicas)
    is_accelerated = workers < replicas
    where = name.partition(":")[0]
    processes = on_workers(where, train, case)
    path, values = expected(name)
    check_weights(processes, path, values, workers, is_accelerated)
    check_counts(name, processes, workers)
    for process in processes:
        check_state(case, process, replicas)
        np.testing.assert_equal(process["logs"], processes[0]["logs"])
    if not is_accelerated:
        assert_same_bits(processes)
        for process in processes:
            assert "Workers 0, 1" in " ".join(process["summary"].split())
        return
    for process in processes:
        check_traffic(case, process, workers)


def check_weights(
    processes: list[Result],
    path: Array,
    values: Array,
    workers: int,
    is_accelerated: bool,
) -> None:
    """Accelerators keep no Ritz values."""
    for_weights, for_values = (1e-7, 1e-7) if is_accelerated else (1e-9, 1e-8)
    travelled = distance([path[-1]], flat(processes[0]["start"]))
    assert travelled > 0.1
    for process in processes:
        away = distance(flat(process["weights"]), [path[-1]])
        assert away <= for_weights * travelled
    for _, variables in by_rank(processes, "variables"):
        np.testing.assert_equal(variables, processes[0]["variables"][0])
    for rank, got in by_rank(processes, "ritz_values"):
        if rank >= workers:
            assert got is None
            continue
        np.testing.assert_array_equal(got, processes[0]["spectrum"])
        error = np.abs(got - values).max()
        assert error <= for_values * np.abs(values).max()


def check_counts(name: str, processes: list[Result], workers: int) -> None:
    """A fault of a worker skips a step, of an accelerator an estimation."""
    faults = [rank < workers for _, rank, _ in CASES[name].faults]
    counts = {"skipped": sum(faults), "failures": faults.count(False)}
    updates = 10 - counts["skipped"]
    if "accumulation" in name:  # two steps for an update
        updates, counts["estimations"] = 5, 2
    elif workers == replicas_of(name):  # in updates 2, 4, 6, 8
        counts["estimations"] = 4
    for process in processes:
        assert process["iterations"] == updates
    for key, want in counts.items():
        for rank, count in by_rank(processes, key):
            assert count == (want if rank < workers else 0)


def check_state(case: Training, process: Result, replicas: int) -> None:
    """Workers store directions, accelerators a basis and weights.

    Basis and directions are divided evenly, up to padding.
    """
    options = FOSI_DEFAULTS | dict(case.options)
    workers = count_workers(case, replicas)
    count = options["num_largest"] + options["num_smallest"]
    size = sum(w.size for w in process["weights"])
    shape, local = (count, -(-size // workers)), count
    if options["layout"] == "columns":
        local = -(-count // workers)
        shape = local, size
    ranks, kept = process["ranks"], process["state_bytes"]
    assert process["shapes"] == [shape if r < workers else None for r in ranks]
    # Ritz values, the length of Newton steps, and momentum; with accumulation
    # or plain SGD's momentum, one more vector.
    more = case.inner == "sgd" or "accumulation" in case.inner
    directions = 8 * (np.prod(shape) + count + 1 + local * (1 + more))
    basis = 8 * options["lanczos_steps"] * -(-size // (replicas - workers or 2))
    is_paper, trains = (
        options.get("final_update") == "paper",
        ranks[0] < workers,
    )
    assert kept["directions"] == (directions if trains else 0)
    assert kept["copies"] == 8 * size * (2 * is_paper if trains else 1)
    if workers == replicas:
        assert kept["basis"] == basis
    else:  # with the rest of the Lanczos iteration's state
        assert kept["basis"] == 0 if trains else kept["basis"] >= basis
    assert kept["counters"] == 8 * (6 + (workers < replicas))
    assert kept["total"] == sum(kept.values()) - kept["total"]


def check_traffic(case: Training, process: Result, workers: int) -> None:
    """Accelerators receive weights, workers gradients and directions."""
    plain, moved = (
        process["communication_bytes"][kind] for kind in ("plain", "estimation")
    )
    assert "the first" not in process["summary"]
    if process["ranks"][0] < workers:
        assert moved["lanczos"] == moved["weights"] == 0
        assert moved["directions"] > 0
        if case.options["final_update"] == "paper":
            nothing = dict.fromkeys(moved, 0)
            assert plain == nothing | {"gradients": moved["gradients"]}
    else:
        assert moved["weights"] == 8 * SIZE
        sent = moved["gradients"], moved["projections"], moved["directions"]
        assert sent == (0, 0, 0)


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


def warmup() -> list[int]:
    """Return the warm-up of each replica, for other lengths on workers."""
    case = fosi("rows", "small", "sgd", warmup_steps=None)
    optimizer = training.build(case).optimizer
    optimizer.method.set_run_length(40 * (1 + local_ranks()[0]))
    return [int(state.warmup) for state in optimizer.method.states]


def test_all_workers_use_one_warmup(on_workers: Any) -> None:
    """All workers use worker 0's warm-up: 7.5 % of 40 steps."""
    assert on_workers("two", warmup) == [[3], [3]]
