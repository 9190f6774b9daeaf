"""Every way to take steps with Keras comes to the same."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import Array, append_one
from tests.support.small import (
    CLASSES,
    FEATURES,
    ROWS,
    curvature,
    data,
    gradients_of,
    kfac_of,
    loss,
    mlp,
)

X, Y = data()
STEPS = 3


class OwnTrainStep(keras.Model):
    """A train step as in Keras' guides."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(value, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": value}


def by_fit(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss())
    model.fit(X, Y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    return model


def by_fit_on_a_dataset(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss())
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS)
    model.fit(batches, shuffle=False, verbose=0)
    return model


def by_train_on_batch(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss())
    for _ in range(STEPS):
        model.train_on_batch(X, Y)
    return model


def by_eager_fit(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.fit(X, Y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    return model


def by_steps_per_execution(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss(), steps_per_execution=2)
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS)
    model.fit(batches, shuffle=False, verbose=0)
    return model


def by_own_train_step(model: Any) -> Any:
    return by_fit(OwnTrainStep(model.inputs, model.outputs))


def by_eager_loop(model: Any) -> Any:
    optimizer = tfkfac.KFAC().attach(model)
    for _ in range(STEPS):
        gradients = gradients_of(model, X, Y)
        optimizer.apply(gradients, model.trainable_variables)
    model.optimizer = optimizer
    return model


def by_function_loop(model: Any) -> Any:
    optimizer = tfkfac.KFAC().attach(model)

    @tf.function
    def step(x: Any, y: Any) -> None:
        gradients = gradients_of(model, x, y)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)

    for _ in range(STEPS):
        step(X, Y)
    model.optimizer = optimizer
    return model


def by_loop_with_loss_scale(model: Any) -> Any:
    scaler = keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())
    scaler.inner_optimizer.attach(model, loss_scaler=scaler)
    for _ in range(STEPS):
        gradients = gradients_of(
            model, X, Y, lambda y, p: scaler.scale_loss(loss()(y, p))
        )
        scaler.apply(gradients, model.trainable_variables)
    model.optimizer = scaler
    return model


@pytest.fixture(scope="module")
def run_by_fit() -> dict[str, Array]:
    return trained(by_fit(mlp()))


def trained(model: Any) -> dict[str, Array]:
    weights = {str(i): w for i, w in enumerate(model.get_weights())}
    return {**weights, **curvature(kfac_of(model))}


@pytest.mark.parametrize(
    "train",
    [
        by_fit_on_a_dataset,
        by_train_on_batch,
        by_eager_fit,
        by_steps_per_execution,
        by_own_train_step,
        by_eager_loop,
        by_function_loop,
        by_loop_with_loss_scale,
    ],
)
def test_every_way_of_training_is_the_same(
    train: Callable[[Any], Any], run_by_fit: dict[str, Array]
) -> None:
    """Weights, factors, decompositions and counters, after three steps."""
    model = train(mlp())
    got = trained(model)
    # Factors and inverses of both layers, and the counters.
    assert len(got) == 4 + 3 + 2 * 9
    assert list(got) == list(run_by_fit)
    assert int(kfac_of(model).iterations) == STEPS
    for name, want in run_by_fit.items():
        np.testing.assert_allclose(
            got[name], want, rtol=2e-4, atol=2e-5, err_msg=name
        )


def test_steps_were_not_all_the_same(run_by_fit: dict[str, Array]) -> None:
    """The comparison above would notice a model that did not train."""
    for before, name in zip(mlp().get_weights(), run_by_fit, strict=False):
        assert np.abs(run_by_fit[name] - before).max() > 1e-3
    assert any(value.any() for value in run_by_fit.values())


def test_several_inputs_and_outputs() -> None:
    """Dictionaries, losses and sample weights per output, in a dataset."""
    keras.utils.set_random_seed(0)
    one = keras.Input((FEATURES,), name="one")
    two = keras.Input((2,), name="two")
    x = layers.Concatenate()([one, two])
    x = layers.Dense(5, activation="tanh", name="trunk")(x)
    outputs = {
        "label": layers.Dense(CLASSES, name="label")(x),
        "value": layers.Dense(1, name="value")(x),
    }
    model = keras.Model({"one": one, "two": two}, outputs)
    model.compile(
        tfkfac.KFAC(), {"label": loss(), "value": "mse"}, run_eagerly=True
    )
    inputs = {"one": X, "two": X[:, :2]}
    targets = {"label": Y, "value": X[:, :1]}
    weights = {"label": np.ones(ROWS), "value": np.zeros(ROWS)}
    batches = tf.data.Dataset.from_tensors((inputs, targets, weights))
    model.fit(batches, shuffle=False, verbose=0)
    blocks = kfac_of(model).factors()
    assert set(blocks) == {"trunk", "label", "value"}
    assert blocks["label"]["G"].any()
    assert not blocks["value"]["G"].any()
    a = append_one(np.concatenate([X, X[:, :2]], axis=1))
    assert_close(blocks["trunk"]["A"], a.T @ a / ROWS, 1e-5, "A")
