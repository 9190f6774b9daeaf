"""Models that are built, or called, late."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.small import (
    CLASSES,
    FEATURES,
    LateBuilt,
    compiled_mlp,
    data,
    kfac_of,
    loss,
    unbuilt_sequential,
)

X, Y = data()


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
