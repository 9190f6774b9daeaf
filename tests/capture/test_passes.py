"""Two gradients of one forward pass: factors use the applied gradient."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import check_factors, find, randomize, weights_of
from tests.support.reference import append_one, factors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype("float32")
Y = RNG.normal(size=(2, 6, 2)).astype("float32")

# Weights of the two gradients in the applied gradient, and in G.
APPLIED = {
    "sum": ((1, 1), (1, 1)),
    "first": ((1, 0), (1, 0)),
    "second": ((0, 1), (0, 1)),
    "sum, clipped": ((0.1, 0.1), (1, 1)),
    "second, clipped": ((0, 0.1), (0, 1)),
}


def run(applied: Any, eager: bool, layer: Any) -> Any:
    """Run a step with a weighted sum of the gradients of two losses."""
    model = keras.Sequential([keras.Input((3,)), layer])
    randomize(model)
    optimizer = tfkfac.KFAC(keras.optimizers.SGD(0.0)).attach(model)

    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            outputs = model(X, training=True)
            losses = [
                tf.reduce_sum(tf.square(outputs - y)) / (2 * len(X)) for y in Y
            ]
        variables = model.trainable_variables
        values = [v.value for v in variables]
        grads = [tape.gradient(loss, values) for loss in losses]
        optimizer.apply(
            [
                sum(w * g for w, g in zip(applied, both, strict=True))
                for both in zip(*grads, strict=True)
            ],
            variables,
        )

    (step if eager else tf.function(step))()
    return optimizer


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        ("sum", False),
        ("first", True),
        ("second", True),
        ("sum, clipped", True),
        ("second, clipped", False),
    ],
)
def test_factors_use_the_applied_gradient(name: str, eager: bool) -> None:
    applied, counted = APPLIED[name]
    layer = layers.Dense(2, name="block")
    optimizer = run(applied, eager, layer)
    a = append_one(X.astype(np.float64))
    out = a @ np.vstack(weights_of(layer))
    g = sum(w * (out - y) for w, y in zip(counted, Y, strict=True))
    want = factors(a[:, None], g[:, None])
    check_factors(find(optimizer.factors(), "block"), *want)


def test_warning_for_another_gradient(capfd: Any) -> None:
    optimizer = run((1, -3), True, layers.Dense(2, name="block"))
    assert (
        "tfkfac: block: the applied gradient is neither"
        in capfd.readouterr().err
    )
    lines: list[str] = []
    optimizer.summary(print_fn=lines.append)
    assert "gradients of other passes in block: 1" in lines[0]


def test_one_gradient_costs_nothing(capfd: Any) -> None:
    """With one gradient nothing is compared, whatever is applied."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    optimizer = tfkfac.KFAC().attach(model)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X, training=True)))
    variables = model.trainable_variables
    grads = tape.gradient(loss, [v.value for v in variables])
    optimizer.apply([tf.ones_like(g) for g in grads], variables)
    assert "tfkfac" not in capfd.readouterr().err
