"""Factors of deep, shared and composed models.

They are compared with explicit per-example gradients of a float64 twin, or
with those of two layers by hand.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    assert_close,
    check_factors,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import deep_model, targets
from tests.support.reference import Array, append_one, factors

SHARING = ["expand", "reduce"]
BATCH = 4


# ---------------------------------------- per-example gradients, deep nets
def per_example_gradients(
    model: Any, x: Array, labels: Array
) -> dict[str, Array]:
    """Gradients of each l_n: path of the variable -> (batch, ...)."""
    found: dict[str, list[Array]] = {}
    for n in range(len(x)):
        with tf.GradientTape() as tape:
            logits = model(x[n : n + 1], training=True)
            loss = keras.losses.sparse_categorical_crossentropy(
                labels[n : n + 1], logits, from_logits=True
            )
        variables = model.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        for v, g in zip(variables, grads, strict=True):
            found.setdefault(v.path, []).append(g.numpy())
    return {k: np.stack(v) for k, v in found.items()}


@pytest.mark.parametrize("eager", [True, False])
def test_deep_model_per_example(eager: bool) -> None:
    """Reduced G is the second moment of the per-example bias gradients.

    A bias's per-example gradient is the sum of g over the positions, so this
    holds for every layer and needs no knowledge of what the layer does.
    """
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    grads = per_example_gradients(deep_model("float64"), x, labels)
    model = deep_model("float32")
    step = train_once(
        model,
        x,
        labels,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weight_sharing="reduce",
        eager=eager,
    )
    groups = {"grouped": 2, "depthwise": 4}
    names = [
        *("conv", "depthwise", "grouped", "einsum"),
        *("sequence", "hidden", "logits"),
    ]
    for name in names:
        b = grads[f"{name}/bias"].reshape(5, groups.get(name, 1), -1)
        G = np.einsum("ngi,ngj->gij", b, b) / 5
        G = G if name in groups else G[0]
        assert_close(step.of(name)["G"], G, 3e-5, f"G of {name}")
    u = np.stack([grads["norm/gamma"], grads["norm/beta"]], axis=-1)
    G = np.einsum("nci,ncj->cij", u, u) / 5
    assert_close(step.of("norm")["G"], G, 3e-5, "G of norm")
    # One position: the kernel's per-example gradient is a (x) g.
    for name in ("hidden", "logits"):
        b, k = grads[f"{name}/bias"], grads[f"{name}/kernel"]
        at = np.argmax(np.abs(b), axis=1)
        n = np.arange(5)
        a = append_one(k[n, :, at] / b[n, at][:, None])
        assert_close(step.of(name)["A"], a.T @ a / 5, 3e-5, f"A of {name}")
    assert len(step.factors) == len(names) + 1


# --------------------------------------------- shared and composed models
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("eager", [True, False])
def test_shared_layer_pools_rows(sharing: str, eager: bool) -> None:
    """Called twice on inputs of different lengths."""
    first, second = keras.Input((3, 4)), keras.Input((5, 4))
    layer = layers.Dense(2, name="twice")
    model = keras.Model([first, second], [layer(first), layer(second)])
    randomize(model)
    x = [make_input("", (3, 4), BATCH), make_input("", (5, 4), BATCH, 7)]
    rng = np.random.default_rng(3)
    y = [rng.normal(size=(BATCH, s, 2)).astype("float32") for s in (3, 5)]
    kernel, bias = weights_of(model)
    pairs = []
    for inputs, target in zip(x, y, strict=True):
        a = append_one(inputs.astype(np.float64))
        pairs.append((a, a @ np.vstack([kernel, bias]) - target))
    if sharing == "expand":
        rows = [a.reshape(-1, 5) for a, _ in pairs]
        A = sum(r.T @ r for r in rows) / (8 * BATCH)
        G = sum(np.einsum("nsi,nsj->ij", g, g) for _, g in pairs) / BATCH
    else:
        A = sum(factors(a, g, sharing)[0] for a, g in pairs) / 2
        G = sum(factors(a, g, sharing)[1] for a, g in pairs)
    step = train_once(
        model,
        x,
        y,
        loss=[half_squared_error, half_squared_error],
        weight_sharing=sharing,
        eager=eager,
    )
    check_factors(step.of("twice"), np.asarray(A), np.asarray(G))


def test_shared_layer_in_a_chain() -> None:
    """The second call's input is the first call's output."""

    def build() -> Any:
        layer = layers.Dense(3, activation="tanh", name="twice")
        inputs = keras.Input((3,))
        twice = keras.Model(inputs, layer(layer(inputs)))
        randomize(twice)
        return twice

    model = build()
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
    step = train_once(model, x, y, eager=False)
    check_factors(step.of("twice"), A, G)
    # The update uses the sum of both calls' gradients.
    W = (a1.T @ g1 + a2.T @ g2) / BATCH
    P = np.vstack(train_once(build(), x, y, inner=1e10, damping=1e10).delta)
    assert_close(P, W, 1e-4, "gradient")


def two_dense(x: Array, y: Array, weights: list[Array]) -> dict[str, Any]:
    """Factors of Dense(tanh), Dense without bias under the half square."""
    kernel, bias, last = weights
    a1 = append_one(x.astype(np.float64))
    h = np.tanh(a1 @ np.vstack([kernel, bias]))
    g2 = h @ last - y
    g1 = (g2 @ last.T) * (1 - h**2)
    return {
        "first": factors(a1[:, None], g1[:, None]),
        "second": factors(h[:, None], g2[:, None]),
    }


def nested_model() -> Any:
    inner = keras.Sequential(
        [layers.Dense(4, activation="tanh", name="first")], name="inner"
    )
    x = keras.Input((3,))
    outer = layers.Dense(2, use_bias=False, name="second")
    return keras.Model(x, outer(inner(x)))


def deeply_nested_model() -> Any:
    first = layers.Dense(4, activation="tanh", name="first")
    core = keras.Sequential([keras.Input((3,)), first], name="core")
    shell = keras.Sequential([keras.Input((3,)), core], name="shell")
    last = layers.Dense(2, use_bias=False, name="second")
    return keras.Sequential([keras.Input((3,)), shell, last])


class Pair(keras.Model):
    """Subclassed, with its layers in a list."""

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
    """A custom layer that owns a Dense."""

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


COMPOSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (nested_model, "inner/first"),
    "deeply_nested": (deeply_nested_model, "core/first"),
    "subclassed": (Pair, "first"),
    "custom_layer": (wrapped_model, "wrapped/first"),
}


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("kind", COMPOSED)
def test_composed_model(kind: str, eager: bool) -> None:
    factory, first = COMPOSED[kind]
    model = factory()
    x = make_input("", (3,), BATCH)
    model(x)
    randomize(model)
    y = np.random.default_rng(4).normal(size=(BATCH, 2)).astype("float32")
    want = two_dense(x, y, weights_of(model))
    step = train_once(model, x, y, eager=eager)
    assert len(step.factors) == 2
    check_factors(step.of(first), *want["first"])
    check_factors(step.of("second"), *want["second"])


def test_paths_are_unique() -> None:
    """Two branches with equally named layers keep their own factors."""
    x = keras.Input((3,))
    branches = [
        keras.Sequential([layers.Dense(2, name="dense")], name=name)
        for name in ("left", "right")
    ]
    left, right = (branch(x) for branch in branches)
    right = layers.Activation("tanh")(right)
    model = keras.Model(x, layers.Add()([left, right]))
    randomize(model)
    data = make_input("", (3,), BATCH)
    y = targets(model, data)
    a = append_one(data.astype(np.float64))
    left, right = (a @ np.vstack(weights_of(b)) for b in branches)
    g = left + np.tanh(right) - y
    want = {"left": g, "right": g * (1 - np.tanh(right) ** 2)}
    step = train_once(model, data, y)
    assert len(step.factors) == 2
    for name, rows in want.items():
        check_factors(
            step.of(f"{name}/dense"), *factors(a[:, None], rows[:, None])
        )
