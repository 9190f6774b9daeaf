"""A layer at each time step has the factors of one on sequences."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    CURVES,
    SLOPES,
    assert_close,
    check_factors,
    compiled,
    find,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import (
    expected_factors,
    expected_rows,
    targets,
)
from tests.support.layer_views import view_of
from tests.support.reference import Array, append_one, factors

SHARING = ["expand", "reduce"]
BATCH, TIME = 4, 3


def distributed(layer: Any, *shape: int | None) -> Any:
    """A model of one layer at each time step."""
    model = keras.Sequential(
        [keras.Input(shape), layers.TimeDistributed(layer, name="each")]
    )
    randomize(model)
    return model


def dense_rows(
    model: Any, x: Array, y: Array, activation: str | None
) -> tuple[Array, Array]:
    """a and g of a dense layer on sequences."""
    a = append_one(x.astype(np.float64))
    z = a @ np.vstack(weights_of(model))
    if activation == "softmax":
        out = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        back = out * (out - y)
        return a, back - out * back.sum(-1, keepdims=True)
    out = CURVES[activation](z)
    return a, (out - y) * SLOPES[activation](out)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("activation", [None, "tanh", "softmax"])
def test_dense(activation: str | None, sharing: str) -> None:
    layer = layers.Dense(3, activation=activation, name="block")
    model = distributed(layer, TIME, 4)
    x = make_input("", (TIME, 4), BATCH)
    y = targets(model, x)
    a, g = dense_rows(model, x, y, activation)
    step = train_once(model, x, y, weight_sharing=sharing)
    assert list(step.factors) == ["each/block"]
    check_factors(step.of("block"), *factors(a, g, sharing))


def test_time_steps_of_unknown_number() -> None:
    """Keras then calls the layer in a vectorised loop; `B` is the batch's."""
    layer = layers.Dense(3, activation="tanh", name="block")
    model = distributed(layer, None, 4)
    optimizer = compiled(model)
    # Keras 3.15 counts the steps by the examples there.
    x = make_input("", (TIME, 4), TIME)
    y = targets(model, x)
    a, g = dense_rows(model, x, y, "tanh")

    @tf.function(input_signature=[tf.TensorSpec((None, None, 4))])
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(half_squared_error(y, model(x)))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)

    step(x)
    check_factors(find(optimizer.factors(), "block"), *factors(a, g))


def test_the_same_step_as_on_sequences() -> None:
    deltas = []
    for wrap in (layers.TimeDistributed, lambda layer: layer):
        layer = layers.Dense(3, activation="tanh", name="block")
        model = keras.Sequential([keras.Input((TIME, 4)), wrap(layer)])
        randomize(model)
        x = make_input("", (TIME, 4), BATCH)
        deltas.append(train_once(model, x, targets(model, x)).delta)
    for got, want in zip(*deltas, strict=True):
        assert_close(got, want, 1e-4, "step")


def test_mixed_precision() -> None:
    """Pre-activations are computed in the precision of the weights."""
    layer = layers.Conv1D(
        3, 2, activation="tanh", dtype="mixed_bfloat16", name="block"
    )
    model = distributed(layer, TIME, 4, 2)
    x = make_input("", (TIME, 4, 2), BATCH)
    y = targets(model, x)
    a, g = expected_rows(
        view_of(layer), weights_of(model), images(x), images(y), "tanh"
    )
    step = train_once(model, x, y)
    want = expected_factors(view_of(layer), steps(a), steps(g), "expand")
    check_factors(step.of("block"), *want, rtol=2e-2)


def images(x: Array) -> Array:
    """The time steps as examples."""
    return x.reshape(-1, *x.shape[2:])


def steps(rows: Array) -> Array:
    """`(groups, batch * time, shared, features)`, time to the positions."""
    groups, _, _, features = rows.shape
    return rows.reshape(groups, BATCH, -1, features)


LINEAR: dict[str, tuple[Callable[[], Any], tuple[int, ...], str | None]] = {
    "conv": (
        lambda: layers.Conv2D(
            2, 2, padding="same", activation="relu", name="block"
        ),
        (3, 2, 2),
        "relu",
    ),
    "depthwise": (
        lambda: layers.DepthwiseConv1D(2, activation="tanh", name="block"),
        (4, 2),
        "tanh",
    ),
    "einsum": (
        lambda: layers.EinsumDense(
            "abc,cd->abd", (None, 2), bias_axes="d", name="block"
        ),
        (2, 3),
        None,
    ),
    "embedding": (lambda: layers.Embedding(6, 3, name="block"), (2,), None),
}


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("case", LINEAR)
def test_other_layers(case: str, sharing: str) -> None:
    """Positions are those of all time steps of an example."""
    factory, shape, curve = LINEAR[case]
    layer = factory()
    model = distributed(layer, TIME, *shape)
    x = make_input(case, (TIME, *shape), BATCH)
    y = targets(model, x)
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), images(x), images(y), curve)
    step = train_once(model, x, y, weight_sharing=sharing)
    want = expected_factors(view, steps(a), steps(g), sharing)
    check_factors(step.of("block"), *want)


def test_normalization() -> None:
    """One gradient for an example, whatever the number of steps."""
    layer = layers.LayerNormalization(center=False, name="block")
    model = distributed(layer, TIME, 4)
    x = make_input("", (TIME, 4), BATCH)
    y = targets(model, x)
    wide = x.astype(np.float64)
    mean = wide.mean(-1, keepdims=True)
    hat = (wide - mean) / np.sqrt(wide.var(-1, keepdims=True) + layer.epsilon)
    (gamma,) = weights_of(model)
    u = np.sum((hat * gamma - y) * hat, axis=1)
    step = train_once(model, x, y)
    G = np.mean(u**2, axis=0)[:, None, None]
    assert_close(step.of("block")["G"], G, 1e-5, "G")


def test_mask() -> None:
    """Padded time steps without a loss are no rows of A."""
    keep = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    inputs = keras.Input((TIME, 4))
    hidden = layers.Masking()(inputs)
    layer = layers.Dense(2, name="block")
    model = keras.Model(inputs, layers.TimeDistributed(layer)(hidden))
    randomize(model)
    x = make_input("", (TIME, 4), BATCH) * keep[..., None]
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    g = (a @ np.vstack(weights_of(model)) - y) * keep[..., None]
    step = train_once(model, x, y, loss="mse")
    A, _ = factors(a, g, keep=keep)
    assert_close(step.of("block")["A"], A, 1e-5, "A")
