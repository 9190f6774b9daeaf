"""Factors of shared and composed models."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.harness import (
    check_factors,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import targets
from tests.support.reference import append_one, factors

BATCH = 4


def test_shared_layer_pools_rows() -> None:
    """The rows of two calls on inputs of different lengths are pooled."""
    first, second = keras.Input((3, 4)), keras.Input((5, 4))
    layer = layers.Dense(2, name="twice")
    model = keras.Model([first, second], [layer(first), layer(second)])
    randomize(model)
    x = [make_input("", (3, 4), BATCH), make_input("", (5, 4), BATCH, 7)]
    rng = np.random.default_rng(3)
    y = [rng.normal(size=(BATCH, s, 2)).astype("float32") for s in (3, 5)]
    a, g = (np.concatenate(values, 1, dtype=np.float64) for values in (x, y))
    a = append_one(a)
    want = factors(a, a @ np.vstack(weights_of(model)) - g)
    step = train_once(model, x, y, loss=[half_squared_error] * 2)
    check_factors(step.of("twice"), *want)


def test_shared_layer_in_a_chain() -> None:
    """A layer is called twice; the second input is the first output."""
    layer = layers.Dense(3, activation="tanh", name="twice")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layer(layer(inputs)))
    randomize(model)
    x = make_input("", (3,), BATCH)
    y = targets(model, x)
    kernel, bias = weights_of(model)
    matrix = np.vstack([kernel, bias])
    a1 = append_one(x.astype(np.float64))
    h = np.tanh(a1 @ matrix)
    a2 = append_one(h)
    out = np.tanh(a2 @ matrix)
    g2 = (out - y) * (1 - out**2)
    g1 = (g2 @ kernel.T) * (1 - h**2)
    A = (a1.T @ a1 + a2.T @ a2) / (2 * BATCH)
    G = (g1.T @ g1 + g2.T @ g2) / BATCH
    step = train_once(model, x, y)
    check_factors(step.of("twice"), A, G)


def nested_model() -> Any:
    first = layers.Dense(4, activation="tanh", name="first")
    core = keras.Sequential([first], name="core")
    shell = keras.Sequential([keras.Input((3,)), core], name="shell")
    x = keras.Input((3,))
    outer = layers.Dense(2, use_bias=False, name="second")
    return keras.Model(x, outer(shell(x)))


class Pair(keras.Model):
    """Subclassed model with its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = [
            layers.Dense(4, activation="tanh", name="first"),
            layers.Dense(2, use_bias=False, name="second"),
        ]

    def call(self, x: Any) -> Any:
        for layer in self.stack:
            x = layer(x)
        return x


class Wrapped(layers.Layer):
    """Custom layer with a `Dense` sublayer."""

    def __init__(self) -> None:
        super().__init__(name="wrapped")
        self.dense = layers.Dense(4, name="first")

    def build(self, input_shape: Any) -> None:
        self.dense.build(input_shape)
        super().build(input_shape)

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(self.dense(x))


def wrapped_model() -> Any:
    last = layers.Dense(2, use_bias=False, name="second")
    return keras.Sequential([keras.Input((3,)), Wrapped(), last])


@pytest.mark.parametrize(
    ("factory", "first", "eager"),
    [
        (nested_model, "core/first", True),
        (Pair, "first", False),
        (wrapped_model, "wrapped/first", False),
    ],
)
def test_composed_model(factory: Any, first: str, eager: bool) -> None:
    """The factors equal the factors of the same layers in a flat model."""
    model = factory()
    x = make_input("", (3,), BATCH)
    y = np.random.default_rng(4).normal(size=(BATCH, 2)).astype("float32")
    model(x)
    randomize(model)
    plain = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh", name="first"),
            layers.Dense(2, use_bias=False, name="second"),
        ]
    )
    plain.set_weights(model.get_weights())
    want = train_once(plain, x, y).factors
    step = train_once(model, x, y, eager=eager)
    assert len(step.factors) == 2
    check_factors(step.of(first), *want["first"].values())
    check_factors(step.of("second"), *want["second"].values())
