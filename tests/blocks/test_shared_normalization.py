"""Normalisation layers of one graph that must not share a traced function."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import (
    assert_close,
    half_squared_error,
    randomize,
    train_once,
)
from tests.support.layers import make_input, per_example, targets

LAYER, BATCH = layers.LayerNormalization, layers.BatchNormalization


class Shifted(layers.LayerNormalization):
    """Layer with an attribute that is not in its config."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def call(self, inputs: Any) -> Any:
        return super().call(inputs + self.shift * inputs**2)


tfkfac.register_block(Shifted, like=LAYER)


class Evaluated(layers.Layer):
    """Batch normalisation by moving averages, also in training."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.norm, self.mean = BATCH(), mean

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.norm.moving_mean.assign(np.full(shape[-1], self.mean))

    def call(self, x: Any) -> Any:
        return self.norm(x, training=False)


def frozen(name: str) -> Any:
    layer = LAYER()
    layer.build((None, 5, 3))
    getattr(layer, name).trainable = False
    return layer


def test_factors_of_each_layer() -> None:
    """G against the gradients of the weights, example by example."""
    pairs = [
        (LAYER(), LAYER(epsilon=10.0)),
        (Shifted(1.0), Shifted(2.0)),
        (Evaluated(1.0), Evaluated(2.0)),
        (frozen("beta"), frozen("gamma")),
    ]
    inputs = keras.Input((5, 3))
    normalized = [layer(inputs) for pair in pairs for layer in pair]
    model = keras.Model(inputs, keras.ops.tanh(layers.Add()(normalized)))
    randomize(model)
    x = make_input("", (5, 3), 4)
    y = targets(model, x)
    gradients = per_example(model, x, y)
    step = train_once(model, x, y, eager=False)
    assert len(step.factors) == 2 * len(pairs)
    for path, block in step.factors.items():
        u = [g for name, g in gradients.items() if f"{path}/" in name]
        u = np.stack(u, -1)
        G = np.einsum("nfi,nfj->fij", u, u) / len(x)
        assert_close(block["G"], G, 1e-5, path)


def test_batch_normalization_of_two_widths() -> None:
    """Layers that differ in the number of features share a traced function."""
    first, dense, last = BATCH(), layers.Dense(2), BATCH()
    inputs = keras.Input((5, 3))
    model = keras.Model(inputs, keras.ops.tanh(last(dense(first(inputs)))))
    randomize(model)
    x = make_input("", (5, 3), 4)
    y = targets(model, x)
    with tf.GradientTape() as tape:
        outer = first(x, training=True)
        hidden = dense(outer)
        inner = last(hidden, training=True)
        value = half_squared_error(y, tf.tanh(inner))
    gradients = tape.gradient(value, [outer, inner])
    factors = train_once(model, x, y, eager=False).factors
    for layer, z, g in zip(
        (first, last), (x, hidden), map(np.asarray, gradients), strict=True
    ):
        deviation = np.sqrt(np.var(z, (0, 1)) + layer.epsilon)
        hat = (np.asarray(z) - np.mean(z, (0, 1))) / deviation
        u = np.stack([(g * hat).sum(1), g.sum(1)], -1)
        G = np.einsum("nfi,nfj->fij", u, u) / len(x)
        assert_close(factors[layer.path]["G"], G, 1e-4, layer.path)
