"""FOSI in all the ways that Keras trains models, on one device."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.fosi_reference import (
    assert_path,
    data,
    fit,
    flat,
    loss,
    mlp,
    small,
)
from tests.support.reference import Array


def trained(model: Any, steps: int = 5, **kwargs: Any) -> Array:
    """The path of a model compiled with the default small optimizer."""
    x, y = data()
    model.compile(small(), loss(), **kwargs)
    return fit(model, x, y, steps)


@pytest.fixture(scope="module")
def plain() -> Array:
    """What `trained` does to the plain model."""
    return trained(mlp())


class Counting(keras.Sequential):
    """Counts traces, or steps when run eagerly."""

    traces = 0

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return super().train_step(*args, **kwargs)


class WithoutInputs(keras.Sequential):
    """Does not tell `compute_loss` what the inputs were."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            value = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(value, weights), weights)
        return {"loss": value}


def test_one_trace(plain: Array) -> None:
    model = mlp(Counting)
    np.testing.assert_array_equal(trained(model), plain)
    assert model.traces == 1
    assert int(model.optimizer.method.states[0].estimations.numpy()) == 2


def test_eagerly(plain: Array) -> None:
    model = mlp(Counting)
    assert_path(trained(model, run_eagerly=True), plain, 1e-4)
    assert model.traces == 5


def test_train_step_without_inputs(plain: Array) -> None:
    np.testing.assert_array_equal(trained(mlp(WithoutInputs)), plain)


def test_several_steps_per_execution(plain: Array) -> None:
    x, y = data()
    model = mlp()
    model.compile(small(), loss(), steps_per_execution=5)
    x, y = np.concatenate([x] * 5), np.concatenate([y] * 5)
    fit(model, x, y, 1)
    np.testing.assert_allclose(flat(model), plain[-1], rtol=0, atol=1e-6)


def test_loss_scaling(plain: Array) -> None:
    """Directions and steps are those of the loss itself."""
    x, y = data()
    model = mlp()
    optimizer = small()
    scaler = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(scaler, loss())
    assert_path(fit(model, x, y, 5), plain, 1e-4)
    assert int(optimizer.iterations) == 5


def loop(model: Any, optimizer: Any, own_loss: bool) -> Callable[[], None]:
    """A step of a custom loop, with Keras' loss or another."""
    x, y = map(tf.constant, data())

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            if own_loss:
                value = tf.reduce_mean(loss()(y, outputs))
            else:
                value = model.compute_loss(x=x, y=y, y_pred=outputs)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(value, weights), weights)

    return step


@pytest.mark.slow
def test_custom_loop(plain: Array) -> None:
    model = mlp()
    model.compile(loss=loss())
    step = loop(model, small().attach(model), own_loss=False)
    for want in plain[1:]:
        step()
        np.testing.assert_allclose(flat(model), want, rtol=0, atol=1e-6)


def test_custom_loop_without_compute_loss() -> None:
    model = mlp()
    step = loop(model, small().attach(model), own_loss=True)
    with pytest.raises(ValueError, match=r"model\.compute_loss\(x=x, y=y"):
        step()
