"""Factors of deep, shared and composed models.

Expected values are computed from per-example gradients of an equal float64
model, or by hand in NumPy for two layers.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
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
from tests.support.layer_cases import make_input
from tests.support.layer_models import (
    deep_model,
    one_layer,
    per_example,
    targets,
)
from tests.support.reference import append_one, factors

BATCH = 4


def test_deep_model_per_example() -> None:
    """With "reduce", G is the second moment of per-example bias gradients.

    The bias gradient of an example is the sum of g over the positions, for all
    layer types.
    """
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    grads = per_example(deep_model("float64"), x, labels, loss)
    step = train_once(
        deep_model("float32"),
        x,
        labels,
        loss=loss,
        weight_sharing="reduce",
        eager=False,
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
        unit = np.argmax(np.abs(b), axis=1)
        n = np.arange(5)
        a = append_one(k[n, :, unit] / b[n, unit][:, None])
        assert_close(step.of(name)["A"], a.T @ a / 5, 3e-5, f"A of {name}")
    assert len(step.factors) == len(names) + 1


# --------------------------------------------- shared and composed models
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
    step = train_once(model, x, y)
    check_factors(step.of("twice"), A, G)
    # The update uses the sum of both calls' gradients.
    W = (a1.T @ g1 + a2.T @ g2) / BATCH
    P = np.vstack(train_once(build(), x, y, inner=1e10, damping=1e10).delta)
    assert_close(P, W, 1e-4, "gradient")


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


COMPOSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (nested_model, "core/first"),
    "subclassed": (Pair, "first"),
    "custom_layer": (wrapped_model, "wrapped/first"),
}


@pytest.mark.parametrize(
    ("case", "eager"),
    [("nested", True), ("subclassed", False), ("custom_layer", False)],
)
def test_composed_model(case: str, eager: bool) -> None:
    """The factors equal the factors of the same layers in a flat model."""
    factory, first = COMPOSED[case]
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


# ------------------------------------------------------------- invariances
@pytest.mark.parametrize(
    ("eager", "scale"), [(True, 2.0**10), (False, 2.0**100)]
)
def test_loss_scale_does_not_change_factors(eager: bool, scale: float) -> None:
    """Factors and step are equal inside Keras' `LossScaleOptimizer`.

    The square of a large scale overflows, so products must be unscaled.
    """
    runs = []
    for scaled in (False, True):
        layer = layers.Dense(2, activation="tanh", name="block")
        model = one_layer(layer, (3,))
        x = make_input("", (3,), BATCH)
        optimizer = compiled(model)
        if scaled:
            outer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=scale
            )
            model.compile(
                optimizer=outer, loss=half_squared_error, run_eagerly=eager
            )
        model.train_on_batch(x, targets(model, x))
        block = find(optimizer.factors(), "block")
        runs.append([block["A"], block["G"], *weights_of(model)])
    for got, want in zip(runs[1], runs[0], strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize(("copies", "sharing"), [(2, "reduce"), (5, "expand")])
def test_batch_size_invariance(copies: int, sharing: str) -> None:
    """A repeated batch has the same factors and the same step."""
    x = make_input("", (6, 6, 2), 3)
    labels = np.array([0, 2, 1])
    once, repeated = (
        train_once(
            deep_model("float32"),
            np.tile(x, (n, 1, 1, 1)),
            np.tile(labels, n),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weight_sharing=sharing,
            kl_clip=0.02,
        )
        for n in (1, copies)
    )
    assert set(once.factors) == set(repeated.factors)
    for path, block in once.factors.items():
        for key, value in block.items():
            other = repeated.factors[path][key]
            assert_close(other, value, 3e-5, f"{key} of {path}")
    for got, want in zip(repeated.delta, once.delta, strict=True):
        assert_close(got, want, 1e-3, "step")
