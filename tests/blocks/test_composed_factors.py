"""Factors of shared, composed and time-distributed layers."""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    assert_close,
    check_factors,
    compiled,
    find,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layers import (
    LAYERS,
    make_input,
    residuals,
    targets,
    views_of,
)
from tests.support.reference import Array, append_one, factors
from tests.support.summaries import sequential

BATCH, TIME = 4, 3


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


def nested_model() -> Any:
    first = layers.Dense(4, activation="tanh", name="first")
    core = keras.Sequential([first], name="core")
    shell = keras.Sequential([keras.Input((3,)), core], name="shell")
    x = keras.Input((3,))
    outer = layers.Dense(2, use_bias=False, name="second")
    return keras.Model(x, outer(shell(x)))


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
    ("factory", "first"),
    [(nested_model, "core/first"), (wrapped_model, "wrapped/first")],
)
def test_composed_model(factory: Any, first: str) -> None:
    """The factors equal the factors of the same layers in a flat model."""
    model = factory()
    x = make_input("", (3,), BATCH)
    y = np.random.default_rng(4).normal(size=(BATCH, 2)).astype("float32")
    model(x)
    randomize(model)
    plain = sequential(
        layers.Dense(4, activation="tanh", name="first"),
        layers.Dense(2, use_bias=False, name="second"),
        shape=(3,),
    )
    plain.set_weights(model.get_weights())
    want = train_once(plain, x, y).factors
    step = train_once(model, x, y)
    assert len(step.factors) == 2
    check_factors(step.of(first), *want["first"].values())
    check_factors(step.of("second"), *want["second"].values())


# -------------------------------------------------------------- TimeDistributed


def distributed(layer: Any, *shape: int | None) -> Any:
    model = sequential(layers.TimeDistributed(layer, name="each"), shape=shape)
    randomize(model)
    return model


@pytest.mark.parametrize(
    ("make", "options", "rtol"),
    [
        (
            partial(layers.Dense, 3, activation="tanh"),
            {"weight_sharing": "reduce", "factor_batch_fraction": 0.5},
            1e-5,
        ),
        # Recomputed pre-activations have the precision of the weights.
        (partial(layers.Dense, 3, "softmax", dtype="mixed_bfloat16"), {}, 2e-2),
        (layers.LayerNormalization, {}, 1e-5),
    ],
)
def test_as_on_sequences(make: Any, options: Any, rtol: float) -> None:
    """Factors and step are equal."""
    results = []
    for wrap in (layers.TimeDistributed, lambda layer: layer):
        layer = wrap(make(name="block"))
        model = keras.Sequential([keras.Input((TIME, 4)), layer])
        randomize(model)
        x = make_input("", (TIME, 4), BATCH)
        results.append(train_once(model, x, targets(model, x), **options))
    got, want = results
    for name, value in want.of("block").items():
        assert_close(got.of("block")[name], value, rtol, name)
    for delta, expected in zip(got.delta, want.delta, strict=True):
        assert_close(delta, expected, 10 * rtol, "step")


def test_dynamic_number_of_time_steps() -> None:
    """Keras then calls the layer in a vectorised loop."""
    layer = layers.Dense(3, activation="tanh", name="block")
    model = distributed(layer, None, 4)
    optimizer = compiled(model)
    # Keras 3.15 needs equally many time steps and examples here.
    x = make_input("", (TIME, 4), TIME)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    out = np.tanh(a @ np.vstack(weights_of(model)))
    g = (out - y) * (1 - out**2)

    @tf.function(input_signature=[tf.TensorSpec((None, None, 4))])
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(half_squared_error(y, model(x)))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)

    step(x)
    check_factors(find(optimizer.factors(), "block"), *factors(a, g))


def images(x: Array) -> Array:
    """Fold time steps into the batch."""
    return x.reshape(-1, *x.shape[2:])


def steps(rows: Array) -> Array:
    """Move time steps from the batch axis to the positions."""
    groups, _, _, features = rows.shape
    return rows.reshape(groups, BATCH, -1, features)


@pytest.mark.parametrize(
    ("case", "sharing"),
    [
        ("depthwise2d_same_strided", "reduce"),
        ("einsum_sequence", "expand"),
    ],
)
def test_other_layers(case: str, sharing: str) -> None:
    """Positions of all time steps of an example are shared positions."""
    factory, shape = LAYERS[case]
    layer = factory(name="block")
    model = distributed(layer, TIME, *shape)
    x = make_input(case, (TIME, *shape), BATCH)
    y = targets(model, x)
    (view,) = views_of(layer)
    g = residuals(model, layer, x, y)
    rows = view.rows(images(x.astype(np.float64)), images(g))
    step = train_once(model, x, y, weight_sharing=sharing)
    want = view.factors(*map(steps, rows), sharing)
    check_factors(step.of("block"), want["A"], want["G"])


def test_mask() -> None:
    keep = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    inputs = keras.Input((TIME, 4))
    hidden = layers.Masking()(inputs)
    layer = layers.Dense(2, name="block")
    distributed = layers.TimeDistributed(layer)
    model = keras.Model(inputs, distributed(hidden))
    randomize(model)
    x = make_input("", (TIME, 4), BATCH) * keep[..., None]
    # In Keras 3.16 and later, the layer drops the mask: all steps have loss.
    keep = keep if distributed.supports_masking else np.ones_like(keep)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    g = (a @ np.vstack(weights_of(model)) - y) * keep[..., None]
    step = train_once(model, x, y, loss="mse")
    A, _ = factors(a, g, keep=keep)
    assert_close(step.of("block")["A"], A, 1e-5, "A")
