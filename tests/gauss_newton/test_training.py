"""`fit` with everything around it: traces, saving, guards, SciPy."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.reference import Array

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, size=(40, 2))
Y = np.sin(3 * X[:, :1]) * X[:, 1:]


def network(units: int = 6) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((2,)), layers.Dense(units, "tanh"), layers.Dense(1)]
    )


def compiled(**kwargs: Any) -> Any:
    model = network()
    model.compile(tfkfac.GaussNewton(**kwargs), "mse")
    return model


def fit(model: Any, epochs: int, first: int = 0, batch: int = 16) -> None:
    """With a smaller last batch; 25 weights, so both spaces are used."""
    model.fit(
        X, Y, batch_size=batch, epochs=first + epochs, initial_epoch=first,
        shuffle=False, verbose=0,
    )  # fmt: skip


def everything(model: Any) -> list[Array]:
    (state,) = model.optimizer.method.states
    return [
        *model.get_weights(),
        *(np.array(v) for v in model.optimizer.variables),
        *(entry.variable.numpy() for entry in state.entries()),
    ]


class Traces(tfkfac.GaussNewton):
    traces = 0

    def apply(self, *args: Any, **kwargs: Any) -> None:
        type(self).traces += 1
        super().apply(*args, **kwargs)


@pytest.mark.slow
def test_one_trace_for_all_batches() -> None:
    """Of 16, 16 and 8 examples, of which the last is in its own space."""
    model = network()
    Traces.traces = 0
    optimizer = Traces()
    model.compile(optimizer, "mse")
    fit(model, 2, batch=32)
    assert optimizer.last_step["residuals"] == 8
    assert Traces.traces == 1


def test_a_batch_of_nan_costs_one_step() -> None:
    model = compiled(solve="residuals")
    model.run_eagerly = True
    model.train_on_batch(X[:8], Y[:8])
    optimizer = model.optimizer
    before = everything(model)
    model.train_on_batch(X[:8] * np.nan, Y[:8])
    assert int(optimizer.skipped_steps) == 1
    for a, b in zip(everything(model), before, strict=True):
        np.testing.assert_array_equal(a, b)
    model.train_on_batch(X[:8], Y[:8])
    assert optimizer.last_step["accepted"] == 1
    assert int(optimizer.skipped_steps) == 1


def test_a_batch_without_weight_is_no_failure() -> None:
    """Nothing to step by: not six tries, and the damping stays."""
    for solve in ("parameters", "residuals"):
        model = compiled(solve=solve, damping=0.25)
        model.run_eagerly = True
        before = model.get_weights()
        model.train_on_batch(X[:8], Y[:8], sample_weight=np.zeros(8))
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.optimizer.last_step["tries"] == 1
        (state,) = model.optimizer.method.states
        assert float(state.damping.numpy()) == 0.25
        assert int(state.rejected.numpy()) == 0


def predict(weights: Any, x: Array) -> Array:
    a, b, c, d = weights
    return np.asarray(np.tanh(x @ a + b) @ c + d)


@pytest.mark.slow
def test_where_scipy_gets() -> None:
    """The minimum that `least_squares` finds from the same weights."""
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(1)
    x = draw.uniform(-2, 2, size=(300, 2))
    with floats("float64"):
        model = network(units=2)
        model.compile(tfkfac.GaussNewton(), "mse")
        start = model.get_weights()
        y = np.tanh(x[:, :1]) - np.tanh(2 * x[:, 1:] - x[:, :1] + 0.5)
        y += 0.1 * draw.normal(size=y.shape)
        data = tf.data.Dataset.from_tensors((x, y)).repeat(100)
        model.fit(data, verbose=0)
        got = float(np.mean((predict(model.get_weights(), x) - y) ** 2))
    sizes = np.cumsum([w.size for w in start])[:-1]

    def residuals(flat: Array) -> Array:
        parts = np.split(flat, sizes)
        weights = [
            p.reshape(w.shape) for p, w in zip(parts, start, strict=True)
        ]
        return np.ravel(predict(weights, x) - y)

    flat = np.concatenate([np.ravel(w) for w in start])
    found = optimize.least_squares(
        residuals, flat, method="lm", xtol=1e-14, ftol=1e-14, gtol=1e-14
    )
    assert got == pytest.approx(np.mean(found.fun**2), rel=1e-6)


@pytest.mark.slow
def test_both_spaces_and_eager_steps_are_the_same() -> None:
    with floats("float64"):
        found = []
        for solve, eager in (
            ("parameters", False), ("residuals", False), ("auto", True),
        ):  # fmt: skip
            model = network()
            model.compile(
                tfkfac.GaussNewton(solve=solve), "mse", run_eagerly=eager
            )
            for _ in range(3):
                model.train_on_batch(X[:20], Y[:20])
            found.append(
                np.concatenate([np.ravel(w) for w in model.get_weights()])
            )
        for other in found[1:]:
            np.testing.assert_allclose(other, found[0], rtol=1e-8, atol=1e-10)
