"""FOSI in all the ways that Keras trains models, on one device."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.fosi_reference import (
    data,
    fit,
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


def test_train_step_without_inputs(plain: Array) -> None:
    np.testing.assert_array_equal(trained(mlp(WithoutInputs)), plain)


def test_custom_loop_without_compute_loss() -> None:
    model = mlp()
    optimizer = small().attach(model)
    x, y = data()
    with tf.GradientTape() as tape:
        value = tf.reduce_mean(loss()(y, model(x, training=True)))
    weights = model.trainable_variables
    with pytest.raises(ValueError, match=r"model\.compute_loss\(x=x, y=y"):
        optimizer.apply(tape.gradient(value, weights), weights)
