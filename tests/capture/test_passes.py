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
from tests.support.small import data, gradients_of, mlp, summary_text

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype("float32")
Y = RNG.normal(size=(2, 6, 2)).astype("float32")


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
    ("applied", "counted", "eager"),
    [
        # Weights of the two gradients in the applied gradient, and in G.
        ((1, 1), (1, 1), False),
        ((1, 0), (1, 0), True),
        ((0, 1), (0, 1), True),
        # Scaled as by clipping.
        ((0.1, 0.1), (1, 1), True),
        ((0, 0.1), (0, 1), False),
    ],
)
def test_factors_use_the_applied_gradient(
    applied: Any, counted: Any, eager: bool
) -> None:
    layer = layers.Dense(2, name="block")
    optimizer = run(applied, eager, layer)
    a = append_one(X.astype(np.float64))
    out = a @ np.vstack(weights_of(layer))
    g = sum(w * (out - y) for w, y in zip(counted, Y, strict=True))
    want = factors(a[:, None], g[:, None])
    check_factors(find(optimizer.factors(), "block"), *want)


def test_warning_for_another_gradient(capfd: Any) -> None:
    """There is no warning if the tape computed a single gradient."""
    optimizer = run((1, -3), True, layers.Dense(2, name="block"))
    message = "tfkfac: block: the applied gradient is neither"
    assert message in capfd.readouterr().err
    assert "gradients of other passes in block: 1" in summary_text(optimizer)
    model = mlp()
    optimizer = tfkfac.KFAC(step="natural").attach(model)
    gradients = gradients_of(model, *data())
    optimizer.apply([tf.ones_like(g) for g in gradients], model.weights)
    assert "tfkfac" not in capfd.readouterr().err
