"""`fit` with everything around it: traces, saving, guards, SciPy."""

import pathlib
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


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(everything(got), everything(want), strict=True):
        np.testing.assert_array_equal(a, b)


class Traces(tfkfac.GaussNewton):
    traces = 0

    def apply(self, *args: Any, **kwargs: Any) -> None:
        type(self).traces += 1
        super().apply(*args, **kwargs)


@pytest.mark.slow
def test_saving_and_resuming(tmp_path: pathlib.Path) -> None:
    """`.keras`, weights and checkpoints go on bit for bit, in one trace."""
    with floats("float64"):
        whole = compiled()
        fit(whole, 4)
        half = compiled()
        fit(half, 2)
        half.save(tmp_path / "a.keras")
        half.save_weights(tmp_path / "b.weights.h5")
        tf.train.Checkpoint(model=half).save(str(tmp_path / "c"))
        loaded = keras.models.load_model(tmp_path / "a.keras")
        assert loaded.optimizer.get_config() == whole.optimizer.get_config()
        assert_same_bits(loaded, half)
        restored = compiled()
        path = tf.train.latest_checkpoint(tmp_path)
        tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
        assert_same_bits(restored, half)
        for model in (loaded, restored):
            fit(model, 2, first=2)
            assert_same_bits(model, whole)
        assert whole.optimizer.last_step["accepted"] == 1


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


@pytest.mark.slow
def test_a_loop_of_ones_own() -> None:
    """With `compute_loss`, by `attach`, the steps of `fit`."""
    with floats("float64"):
        want = compiled()
        data = tf.data.Dataset.from_tensors((X, Y)).repeat(3)
        want.fit(data, verbose=0)
        model = compiled()
        other = model.optimizer

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x=x, y=y, y_pred=model(x))
            weights = model.trainable_variables
            values = [v.value for v in weights]
            other.apply(tape.gradient(loss, values), weights)

        for x, y in data:
            step(x, y)
        for a, b in zip(model.get_weights(), want.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
