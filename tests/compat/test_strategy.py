import functools
from typing import Any, TypeAlias

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import workers_strategy
from tests.support.cluster import Case, Outcome, run_cases
from tfkfac.compat.strategy import (
    MultiWorkerMirroredStrategy,
    is_repaired,
    repair,
)

Outcomes: TypeAlias = dict[str, Outcome]

# Name: function and keyword arguments. All equal a single process.
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("train", {"validate": True, "epochs": 2}),
    "adam, dataset, partial last batch": (
        "train",
        {"optimizer": "adam", "dataset": True, "rows": 18, "validate": True},
    ),
    "sample weights, callbacks": ("train_with_extras", {}),
    "structures": ("train_structures", {}),
}
# Keras averages over replicas, not over rows: these train differently.
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "last batch": ("train", {"rows": 13, "dataset": True}),
    "last batch of one row": ("train", {"rows": 17}),
    "only batch": ("train", {"rows": 5}),
    "only batch of one row": ("train", {"rows": 1}),
}
# The hardest for `reduce`: strings, and fewer rows on one worker.
HARDEST = "only batch, structures"
REPAIRED = {HARDEST: ("train_structures", {"rows": 5})}


def case(name: str, kind: str) -> Case:
    function, kwargs = (EQUAL | UNEVEN | REPAIRED)[name]
    return Case(f"{workers_strategy.__name__}:{function}", (kind,), kwargs)


@pytest.fixture(scope="module")
def ours() -> Outcomes:
    cases = {name: case(name, "ours") for name in EQUAL | UNEVEN | REPAIRED}
    cases["reduce"] = Case(f"{workers_strategy.__name__}:reductions", ("ours",))
    return run_cases(cases, time_limit=120)


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """What a single process gets, this one."""
    function, kwargs = (EQUAL | UNEVEN | REPAIRED)[name]
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


@pytest.mark.parametrize("name", EQUAL)
def test_equals_a_single_process(ours: Outcomes, name: str) -> None:
    workers = ours[name].get()
    assert_same_everywhere(workers)
    assert_equals_alone(workers, name)


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_batches(ours: Outcomes, name: str) -> None:
    workers = ours[name].get()
    assert_same_everywhere(workers)
    (first, _) = workers
    assert np.all(np.isfinite(first["history"]["loss"]))
    # Every row once and in order, evaluated by rows.
    want = first["expected_outputs"]
    np.testing.assert_allclose(first["outputs"], want, rtol=1e-5, atol=1e-6)
    _, y = workers_strategy.regression(len(want))
    metrics = [np.mean((want - y) ** 2), np.mean(np.abs(want - y))]
    np.testing.assert_allclose(first["metrics"], metrics, rtol=1e-5)


def test_repaired_stock_strategy(ours: Outcomes) -> None:
    stock = run_cases({HARDEST: case(HARDEST, "stock")})
    assert_same_everywhere(ours[HARDEST].get() + stock[HARDEST].get())


def test_repaired_mirrored_strategy() -> None:
    """Whose own `reduce` takes neither strings nor uneven first batches."""
    cases = {name: case(name, "mirrored") for name in (HARDEST, "structures")}
    outcomes = run_cases(cases, workers=1, devices=2)
    outcomes[HARDEST].get()
    assert_equals_alone(outcomes["structures"].get(), "structures")


def test_reduce(ours: Outcomes) -> None:
    for found in ours["reduce"].get():
        vector, (scalar,) = found["structure, sum"]
        assert (vector.tolist(), scalar) == ([3, 3], 3)
        vector, (scalar,) = found["structure, mean"]
        assert (vector.tolist(), scalar) == ([1.5, 1.5], 1.5)
        assert found["scalar, axis"] == 1.5
        assert found["keywords"] == 3
        assert found["uneven, axis"] == pytest.approx(5 / 3)
        assert found["uneven, shape"].tolist() == [2]
        assert found["in graph"] == {"scalar": 1.5, "vector": 1.5}


def test_repair_wants_a_strategy_it_can_repair() -> None:
    with pytest.raises(TypeError, match="Argument `strategy` must be a"):
        repair(tf.distribute.OneDeviceStrategy("CPU:0"))


def test_repair_twice() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert not is_repaired(strategy)
    assert repair(strategy) is strategy
    reduce = strategy.reduce
    assert is_repaired(repair(strategy))
    assert strategy.reduce is reduce


def test_without_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine the same program runs as on several."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = MultiWorkerMirroredStrategy()
    assert repair(strategy) is strategy
    assert "reduce" not in vars(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    history = model.fit(*workers_strategy.regression(5), verbose=0)
    assert np.isfinite(history.history["loss"][0])
