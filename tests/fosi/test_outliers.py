"""The Newton step of one bad batch is bounded, others are as they were."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.lockstep import run_together
from tests.support.reference import Array
from tfkfac.fosi.layouts import LAYOUTS, Geometry
from tfkfac.fosi.subspace import Inner, Subspace


def regression(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def largest(model: Any) -> float:
    return max(float(np.abs(w).max()) for w in model.get_weights())


@pytest.mark.parametrize(
    "inner", ["adam", pytest.param("sgd", marks=pytest.mark.slow)]
)
def test_targets_of_1e10_in_one_batch(inner: str) -> None:
    """Adam alone survives that, so FOSI with Adam has to as well."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    rule = keras.optimizers.get(inner)
    if inner == "sgd":  # which takes what is left of the gradient
        rule.clipnorm = 1.0
    model = regression(tfkfac.FOSI(rule, warmup_steps=3, alpha=0.1))
    for _ in range(10):
        model.train_on_batch(x, y)
    assert int(model.optimizer.estimations) == 1
    before = largest(model)
    model.train_on_batch(x, y + 1e10)
    for _ in range(20):
        model.train_on_batch(x, y)
    assert largest(model) < before + 10
    assert model.evaluate(x, y, verbose=0) < 100 * float(np.var(y))


def by_definition(steps: Array, values: Array) -> Array:
    """Clipped at ten times the root of a running mean of squared lengths."""
    mean, kept = 0.0, []
    for step in steps:
        square = np.sum((step / np.abs(values)) ** 2)
        share = 1.0
        if mean == 0:
            mean = square
        else:
            share = min(1.0, 10 * np.sqrt(mean / square))
            mean = 0.99 * mean + 0.01 * share**2 * square
        kept.append(share * step)
    return np.array(kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_coefficients(layout: str, workers: int) -> None:
    """One length for all directions, whoever has them; most are the bits."""
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(12, 3))
    steps[5, 1], steps[7] = 1e10, -500.0
    values = np.array([-1.0, 2.0, 5.0])
    shared = LAYOUTS[layout](Geometry(23, 3, 0, 5, tf.float64), workers)

    def work(group: Any) -> tuple[list[Array], float]:
        subspace = Subspace(shared, Inner(), group.rank)
        subspace.ritz_values.assign(values)
        kept = []
        for step in steps:
            own = shared.own(tf.constant(step), group.rank)
            kept.append(subspace.bounded(own, group).numpy())
        return kept, float(subspace.square)

    want = by_definition(steps, values)
    clipped = np.any(want != steps, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(clipped), [5, 7])
    for rank, ((got, _), received) in enumerate(run_together(workers, work)):
        for i, one in enumerate(got):
            own = shared.own(tf.constant(want[i]), rank).numpy()
            np.testing.assert_allclose(one, own, rtol=1e-12)
            if not clipped[i]:
                np.testing.assert_array_equal(one, own)
        reported = 12 * Subspace.bound_bytes(shared)
        assert received * 8 == pytest.approx(reported, abs=12)


def test_without_a_gradient() -> None:
    """Zeros are no measure of what comes, and overflow is no step."""
    shared = LAYOUTS["rows"](Geometry(5, 1, 0, 3, tf.float32), 1)
    subspace = Subspace(shared, Inner(), 0)
    subspace.ritz_values.assign([1.0])

    def work(group: Any) -> list[Array]:
        return [
            subspace.bounded(tf.constant([c]), group).numpy()
            for c in (0.0, 7.0, 1e30, 7.0)
        ]

    ((got, _),) = run_together(1, work)
    np.testing.assert_array_equal(np.ravel(got), [0, 7, 0, 7])
