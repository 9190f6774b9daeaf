"""Factors after a training step, against float64 NumPy references.

The tested model is one layer with the loss on its output, so inputs and
pre-activation gradients have a closed form. `test_layers.py` tests all types of
layers.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    FACTOR_RTOL,
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
    make_input,
    per_example,
    problem,
    targets,
)
from tests.support.reference import append_one, factors
from tests.support.summaries import sequential
from tfkfac.blocks.statistics import _broadcast_positions

BATCH = 4


# -------------------------------------------------------------- attention
@pytest.mark.parametrize("name", ["multi_head", "gated"])
def test_attention(name: str) -> None:
    """Projections of cross attention, with `weight_sharing="reduce"`.

    G is the second moment of the bias gradients. A is computed from queries or
    memory; A of the output projection is not checked.
    """

    def build(dtype: str) -> Any:
        if name == "multi_head":
            # Only this layer supports a memory of another width.
            layer, width = layers.MultiHeadAttention(2, 3, dtype=dtype), 6
        else:
            width = 4
            layer = layers.GroupQueryAttention(
                3, 4, 2, use_gate=True, dtype=dtype
            )
        inputs = [keras.Input((3, 4)), keras.Input((5, width))]
        model = keras.Model(inputs, layer(*inputs))
        randomize(model)
        return model

    twin = build("float64")
    x, memory = (make_input("", shape[1:], 3) for shape in twin.input_shape)
    y = targets(twin, [x, memory])
    grads = {
        path.split("/")[-2]: gradient
        for path, gradient in per_example(twin, [x, memory], y).items()
        if path.endswith("bias")
    }
    model = build("float32")
    step = train_once(model, [x, memory], y, weight_sharing="reduce")
    assert len(step.factors) == len(grads)
    for layer, gradient in grads.items():
        block, b = step.of(layer), gradient.reshape(3, -1)
        G = b.T @ b / 3
        if layer == "key":
            # Softmax is invariant to a shift of all keys.
            assert np.abs(G).max() < 1e-20
            assert np.abs(block["G"]).max() < 1e-9
        else:
            assert_close(block["G"], G, 3e-5, f"G of {layer}")
        if layer != "attention_output":
            inputs = memory if layer in ("key", "value") else x
            a = append_one(inputs.mean(1, dtype=np.float64))
            assert_close(block["A"], a.T @ a / 3, FACTOR_RTOL, f"A of {layer}")


def test_prelu_as_activation_of_a_layer() -> None:
    """Both have a block; G of the layer is computed before the activation."""
    prelu = layers.PReLU(name="slopes")
    dense = layers.Dense(3, activation=prelu, name="dense")
    model, x, y = problem(dense, (4,), BATCH)
    gradients = per_example(model, x, y)
    slopes, biases = (gradients[v.path] for v in (prelu.alpha, dense.bias))
    step = train_once(model, x, y)
    G = np.mean(slopes**2, axis=0)
    assert_close(step.of("slopes")["G"], G, 1e-5, "G of the slopes")
    G = biases.T @ biases / BATCH
    assert_close(step.of("dense")["G"], G, 1e-5, "G of the layer")


# ------------------------------------------------------------ rows without loss
def test_sample_weights_per_output() -> None:
    """The rows of a head count where its own loss has a nonzero weight."""
    inputs = keras.Input((3,))
    heads = [layers.Dense(2, name=f"head_{i}") for i in range(2)]
    model = keras.Model(inputs, [head(inputs) for head in heads])
    randomize(model)
    x = make_input("", (3,), 5)
    y = list(np.random.default_rng(5).normal(size=(2, 5, 2)).astype("float32"))
    weights = [
        np.array([1, 0, 1, 0, 2], "float32"),
        np.array([0, 1, 1, 0, 1], "float32"),
    ]
    a = append_one(x.astype(np.float64))
    want = {}
    for head, target, weight in zip(heads, y, weights, strict=True):
        g = (a @ np.vstack(weights_of(head)) - target) * weight[:, None]
        keep = (weight > 0)[:, None]
        want[head.name] = factors(a[:, None], g[:, None], keep=keep)
    step = train_once(
        model, x, y, sample_weight=weights, loss=[half_squared_error] * 2
    )
    for name, (A, G) in want.items():
        check_factors(step.of(name), A, G)


def test_batch_folded_into_positions() -> None:
    """A layer sees positions as examples; the loss has the real batch."""
    layer = layers.Dense(2, name="block")
    inputs = keras.Input((3, 4))
    rows = layer(keras.ops.reshape(inputs, (-1, 4)))
    model = keras.Model(inputs, keras.ops.reshape(rows, (-1, 3, 2)))
    randomize(model)
    x = make_input("", (3, 4), BATCH)
    y = targets(model, x)
    weight = np.array([1, 0, 2, 1], "float32")
    a = append_one(x.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - y
    g = g * weight[:, None, None]
    keep = np.repeat(weight[:, None] > 0, 3, axis=1)
    step = train_once(model, x, y, weight, eager=False)
    check_factors(step.of("block"), *factors(a, g, keep=keep))


def test_weights_of_positions_and_of_examples() -> None:
    """Flags of positions, else a flag for all rows of an example."""
    flags = np.array([[True, False, True], [True, True, True]])
    for shape, want in (
        ((2, 3), flags),
        ((6, 1), flags.reshape(6, 1)),
        ((4, 1), [[False], [False], [True], [True]]),
    ):
        got = _broadcast_positions(tf.constant(flags), tf.constant(shape))
        np.testing.assert_array_equal(got, want)
    # Products of numbers of examples that exceed int32.
    many = np.arange(50_000)[:, None] % 2 == 0
    got = _broadcast_positions(tf.constant(many), tf.constant([50_000, 2]))
    np.testing.assert_array_equal(got, many | np.zeros((1, 2), bool))


# ----------------------------------------------------------- several calls
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


def test_dynamic_number_of_time_steps() -> None:
    """Keras then calls the layer in a vectorised loop."""
    layer = layers.Dense(3, activation="tanh", name="block")
    model = sequential(layers.TimeDistributed(layer), shape=(None, 4))
    randomize(model)
    optimizer = compiled(model)
    # Keras 3.15 needs equally many time steps and examples here.
    x = make_input("", (3, 4), 3)
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
