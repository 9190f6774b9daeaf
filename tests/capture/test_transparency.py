"""Taps do not change the model, and are removed with their owners."""

from pathlib import Path
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
    assert_same,
    compiled_mlp,
    data,
    everything,
    kfac_of,
    loss,
    mlp,
)

X, Y = data()


def test_compile_changes_nothing_of_the_model() -> None:
    """Config, weights, outputs, clones, copies and exports."""
    model = mlp()
    config = model.get_config()
    names = [v.path for v in model.weights]
    want = model.predict(X, verbose=0)
    model.compile(tfkfac.KFAC(step="natural"), loss())
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


def test_export_is_untouched(tmp_path: Path) -> None:
    model = compiled_mlp()
    model.train_on_batch(X, Y)
    model.export(tmp_path / "model", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "model"))
    want = model.predict(X, verbose=0)
    np.testing.assert_allclose(exported.serve(X), want, rtol=1e-6, atol=1e-6)


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


def test_user_overrides_are_restored() -> None:
    """A tap wraps a user's override of `call` and does not remove it."""
    model = mlp()
    layer = model.layers[0]
    original, calls = layer.call, []

    def call(x: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(x, **kwargs)

    object.__setattr__(layer, "call", call)

    def compute_loss(x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return tf.reduce_mean(tf.square(y_pred))

    object.__setattr__(model, "compute_loss", compute_loss)
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert calls == [1]
    model.compile("sgd", loss())
    assert layer.call is call
    assert model.compute_loss is compute_loss


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
