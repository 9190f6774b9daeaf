"""Taps do not change the model, end with their owners, and find late layers."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import append_one
from tests.support.small import (
    CLASSES,
    FEATURES,
    ROWS,
    LateBuilt,
    assert_same,
    compiled_mlp,
    data,
    everything,
    kfac_of,
    loss,
    mlp,
    unbuilt_sequential,
)

X, Y = data()


def test_compile_changes_nothing_of_the_model() -> None:
    """Config, weights, outputs, clones, copies and exports."""
    model = mlp()
    model.run_eagerly = True  # graphs and eager calls round differently
    config = model.get_config()
    names = [v.path for v in model.weights]
    want = model.predict(X, verbose=0)
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    assert model.get_config() == config
    np.testing.assert_array_equal(model.predict(X, verbose=0), want)
    model.train_on_batch(X, Y)
    assert model.get_config() == config
    assert [v.path for v in model.weights] == names
    clone = keras.models.clone_model(model)
    assert clone.get_config() == config
    # Keras compiles the clone of a compiled model with a new optimizer.
    assert kfac_of(clone) is not kfac_of(model)
    before = everything(model)
    clone.train_on_batch(X, Y)
    assert_same(everything(model), before)


def test_activation_is_restored_after_a_call() -> None:
    """Also if the activation or the layer raises."""
    broken = False

    def activation(x: Any) -> Any:
        if broken:
            raise RuntimeError("broken")
        return tf.tanh(x)

    layer = layers.Dense(CLASSES, activation=activation, name="block")
    model = keras.Sequential([keras.Input((FEATURES,)), layer])
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert layer.activation is activation
    broken = True
    with pytest.raises(RuntimeError, match="broken"):
        model.train_on_batch(X, Y)
    assert layer.activation is activation
    broken = False
    model.train_on_batch(X, Y)
    assert int(kfac_of(model).factor_updates) == 2


def test_input_as_a_keyword() -> None:
    class Keywords(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layers.BatchNormalization(name="norm")
            self.logits = layers.Dense(CLASSES, name="logits")

        def call(self, x: Any, training: bool = False) -> Any:
            x = self.norm(training=training, inputs=x)
            return self.logits(inputs=x)

    model = Keywords()
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    blocks = kfac_of(model).factors()
    x = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-3)
    a = append_one(x)
    assert_close(blocks["logits"]["A"], a.T @ a / ROWS, 1e-4, "A")


# --------------------------------------- models that are built, or called, late
class LateBlock(layers.Layer):
    """A container layer that creates its layers in `build`."""

    def build(self, shape: Any) -> None:
        self.hidden = layers.Dense(5, activation="tanh", name="hidden")
        self.hidden.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.hidden(x)


def nested_unbuilt() -> Any:
    inner = keras.Sequential([LateBlock(name="block")], name="inner")
    return keras.Sequential([inner, layers.Dense(CLASSES, name="logits")])


@pytest.mark.parametrize(
    ("build", "eager"), [(LateBuilt, True), (nested_unbuilt, False)]
)
def test_unbuilt_models(build: Callable[[], Any], eager: bool) -> None:
    """Layers that are created in the first step are tapped."""
    keras.utils.set_random_seed(0)
    model = build()
    optimizer = tfkfac.KFAC(0.0, factor_update_interval=1)
    model.compile(optimizer, loss(), run_eagerly=eager)
    model.train_on_batch(X, Y)
    twin = compiled_mlp(0.0, factor_update_interval=1, eager=True)
    twin.set_weights(model.get_weights())
    twin.train_on_batch(X, Y)
    got, want = optimizer.factors(), kfac_of(twin).factors()
    assert [p.rsplit("/")[-1] for p in got] == ["hidden", "logits"]
    for block, flat in zip(got.values(), want.values(), strict=True):
        for name in ("A", "G"):
            assert flat[name].any()
            assert_close(block[name], flat[name], 1e-5, name)


def test_model_whose_call_is_never_used() -> None:
    """The train step of an autoencoder may call only its submodels."""

    class Parts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = unbuilt_sequential()
            self.decoder = keras.Sequential([layers.Dense(FEATURES)])

        def train_step(self, x: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                error = self.decoder(self.encoder(x)) - x
                value = tf.reduce_mean(tf.square(error))
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(value, weights), weights)
            return {"error": value}

    model = Parts()
    model.compile(tfkfac.KFAC(0.02), run_eagerly=True)
    model.fit(X, verbose=0)
    blocks = kfac_of(model).factors()
    assert len(blocks) == 3
    assert all(block["G"].any() for block in blocks.values())
