"""Batches of several sizes, with zero weights and with NaN."""

from typing import Any

import keras
import numpy as np
import pytest

import tfkfac
from tests.support.reference import Array

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, size=(40, 2))
Y = np.sin(3 * X[:, :1]) * X[:, 1:]


def compiled(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    hidden, last = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), hidden, last])
    # Eager unless the test counts traces.
    eager = type(optimizer) is tfkfac.GaussNewton
    model.compile(optimizer, "mse", run_eagerly=eager)
    return model


def everything(model: Any) -> list[Array]:
    (state,) = model.optimizer.method.states
    return [
        *model.get_weights(),
        *(np.array(v) for v in model.optimizer.variables),
        *(entry.variable.numpy() for entry in state.entries()),
    ]


@pytest.mark.slow
def test_one_trace_for_all_batches() -> None:
    """32 and 8 examples for 25 weights use different spaces."""
    traces = []

    class Traces(tfkfac.GaussNewton):
        def apply(self, *args: Any, **kwargs: Any) -> None:
            traces.append(1)
            super().apply(*args, **kwargs)

    model = compiled(Traces())
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.last_step["residuals"] == 8
    assert len(traces) == 1


def test_a_batch_with_nan_is_skipped() -> None:
    model = compiled(tfkfac.GaussNewton(solve="residuals"))
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


def test_a_batch_of_zero_weight_is_not_rejected() -> None:
    """A zero step: one try, and the damping stays."""
    for solve in ("parameters", "residuals"):
        model = compiled(tfkfac.GaussNewton(solve=solve, damping=0.25))
        before = model.get_weights()
        model.train_on_batch(X[:8], Y[:8], sample_weight=np.zeros(8))
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.optimizer.last_step["tries"] == 1
        (state,) = model.optimizer.method.states
        assert float(state.damping.numpy()) == 0.25
        assert int(state.rejected.numpy()) == 0
