"""FOSI in custom training steps; other ways are in `test_same_runs`."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.fosi_reference import data, fit, loss, mlp, small


class Steps(keras.Sequential):
    """A custom `train_step` that calls `compute_loss` without the inputs."""

    traces, own_loss = 0, False

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        self.traces += 1
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            value = tf.reduce_mean(loss()(y, outputs))
            if not self.own_loss:
                value = self.compute_loss(y=y, y_pred=outputs)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(value, weights), weights)
        return {"loss": value}


def test_train_step_without_inputs() -> None:
    paths = []
    for model_class in (keras.Sequential, Steps):
        model = mlp(model_class)
        model.compile(small(), loss())
        paths.append(fit(model, *data(), 5))
    np.testing.assert_array_equal(*paths)
    assert model.traces == 1
    assert int(model.optimizer.estimations) == 2


def test_without_compute_loss() -> None:
    model = mlp(Steps)
    model.own_loss = True
    model.compile(small(), loss())
    with pytest.raises(ValueError, match=r"model\.compute_loss\(x=x, y=y"):
        model.fit(*data(), verbose=0)
