"""Internals of strategies, with one process and with several."""

import ctypes
import functools
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tests.support import workers_strategy
from tests.support.cluster import Case, Pool, run
from tests.support.jobs import SHAPES, Jobs
from tfkfac.cluster.strategy import MultiWorkerMirroredStrategy
from tfkfac.compat.strategies import (
    is_repaired,
    keep_handler,
    local_devices,
    repair,
    summing_replicas,
)

Results = Callable[[str], list[Any]]

# Name: (function, keyword arguments). Results equal a single process.
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "two: sample weights, callbacks": ("train_with_extras", {}),
    "two: structures": ("train_structures", {}),
}
# Keras averages over replicas, not over rows: results differ.
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "two: last batch": ("train", {"rows": 13, "dataset": True}),
    "two: only batch of one row": ("train", {"rows": 1}),
}
# Strings, and fewer rows on one worker, are special cases of `reduce`.
HARDEST = "two: only batch, structures"
REPAIRED = {HARDEST: ("train_structures", {"rows": 5})}


ALL = EQUAL | UNEVEN | REPAIRED
JOBS = Jobs(workers_strategy)
FUNCTIONS = workers_strategy.__name__
for name_, (function_, kwargs_) in ALL.items():
    JOBS.add(name_, function_, **kwargs_)
REDUCE = "two: reduce"
JOBS.add(REDUCE, "reductions")


@pytest.fixture
def results(pool: Pool) -> Results:
    """Function from the name of a job to the results by worker."""
    return functools.partial(JOBS.results, pool)


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """Results of this process."""
    function, kwargs = ALL[name]
    return getattr(workers_strategy, function)(None, **kwargs)


def assert_same_everywhere(workers: list[Any]) -> None:
    first, *others = map(tf.nest.flatten, workers)
    for other in others:
        for got, want in zip(other, first, strict=True):
            np.testing.assert_array_equal(got, want)


def assert_equals_alone(workers: list[Any], name: str) -> None:
    for worker in workers:
        tf.nest.map_structure(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
            worker,
            alone(name),
        )


@pytest.mark.parametrize("name", JOBS.params(EQUAL))
def test_equals_a_single_process(results: Results, name: str) -> None:
    workers = results(name)
    assert_same_everywhere(workers)
    assert_equals_alone(workers, name)


@pytest.mark.parametrize("name", JOBS.params(UNEVEN))
def test_uneven_batches(results: Results, name: str) -> None:
    workers = results(name)
    assert_same_everywhere(workers)
    (first, _) = workers
    assert np.all(np.isfinite(first["history"]["loss"]))
    # Every row is predicted once and in order; metrics average over rows.
    want = first["expected_outputs"]
    np.testing.assert_allclose(first["outputs"], want, rtol=1e-5, atol=1e-6)
    _, y = workers_strategy.regression(len(want))
    metrics = [np.mean((want - y) ** 2), np.mean(np.abs(want - y))]
    np.testing.assert_allclose(first["metrics"], metrics, rtol=1e-5)


@pytest.mark.parametrize("name", JOBS.params([REDUCE]))
def test_reduce(results: Results, name: str) -> None:
    for result in results(name):
        vector, (scalar,) = result["structure, sum"]
        assert (vector.tolist(), scalar) == ([3, 3], 3)
        vector, (scalar,) = result["structure, mean"]
        assert (vector.tolist(), scalar) == ([1.5, 1.5], 1.5)
        assert result["scalar, axis"] == 1.5
        assert result["keywords"] == 3
        assert result["uneven, axis"] == pytest.approx(5 / 3)
        assert result["uneven, shape"].tolist() == [2]
        assert result["in graph"] == {"scalar": 1.5, "vector": 1.5}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS.params([HARDEST]))
def test_repaired_stock_strategy(results: Results, name: str) -> None:
    """In a separate cluster: a process can have one such strategy only."""
    function, kwargs = ALL[name]
    stock = run(f"{FUNCTIONS}:{function}", "stock", *kwargs.values())
    assert_same_everywhere(results(name) + stock)


@pytest.mark.slow
def test_repaired_mirrored_strategy(pool: Pool) -> None:
    """Its own `reduce` supports neither strings nor uneven first batches."""
    name = "two: structures"
    function, kwargs = ALL[name]
    case = Case(f"{FUNCTIONS}:{function}", ("repaired",), kwargs)
    workers = pool.run(name, case, SHAPES["mirrored"]).get()
    assert_equals_alone(workers, name)


def test_repair() -> None:
    """`repair` is idempotent and does not change other strategies."""
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    assert repair(other) is other
    assert not is_repaired(other)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert not is_repaired(strategy)
    assert repair(strategy) is strategy
    reduce = strategy.reduce
    assert is_repaired(repair(strategy))
    assert strategy.reduce is reduce
    (device,) = local_devices(strategy)
    assert "CPU:0" in device.upper()


def test_without_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster the same program runs on one machine."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = MultiWorkerMirroredStrategy()
    reduce = strategy.reduce
    assert is_repaired(strategy)
    assert repair(strategy).reduce is reduce
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    history = model.fit(*workers_strategy.regression(5), verbose=0)
    assert np.isfinite(history.history["loss"][0])


@contract(
    "compat.strategies.summing_replicas",
    "The gradient of `ReplicaContext.all_reduce` is an `all_reduce`.",
)
def test_gradients_of_sums_over_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def gradient(kind: str) -> tf.Tensor:
        x = tf.constant([1.0, 2.0])
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = context.all_reduce(kind, x)
        with summing_replicas(lambda t: 5 * t):
            return tape.gradient(total, x)

    for kind in ("SUM", "MEAN"):  # of one replica
        result = strategy.run(
            tf.function(gradient, autograph=False), args=(kind,)
        )
        assert result.numpy().tolist() == [5, 5]


@contract(
    "compat.strategies.keep_handler",
    "`PyOS_getsig` and `PyOS_setsig` get and set C handlers.",
)
def test_keep_handler() -> None:
    """Also for a handler that was set in C, unknown to Python."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    seen: list[int] = []
    before = signal.signal(
        signal.SIGUSR2, lambda number, _: seen.append(number)
    )
    try:
        with keep_handler(signal.SIGUSR2):
            libc.signal(signal.SIGUSR2, signal.SIG_IGN.value)
            signal.raise_signal(signal.SIGUSR2)
            assert not seen
        signal.raise_signal(signal.SIGUSR2)
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
