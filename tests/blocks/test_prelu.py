"""Slopes of a PReLU against gradients of single examples."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    assert_close,
    half_squared_error,
    randomize,
    train_once,
)
from tests.support.layer_cases import PRELU, make_input
from tests.support.layer_models import one_layer, targets
from tests.support.reference import Array

BATCH = 5


def per_example(model: Any, variable: Any, x: Array, y: Array) -> Array:
    """Gradients of each example's loss, `(batch, size)`, by Keras."""
    found = []
    for n in range(len(x)):
        with tf.GradientTape() as tape:
            out = model(x[n : n + 1], training=True)
            loss = half_squared_error(y[n : n + 1], out)
        found.append(np.ravel(tape.gradient(loss, variable.value)))
    return np.stack(found).astype(np.float64)


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize("case", PRELU)
def test_diagonal_of_the_fisher_matrix(case: str, solver: str) -> None:
    """G and the step, which divides by the damped diagonal."""
    factory, shape = PRELU[case]
    model = one_layer(factory(name="block"), shape)
    x = make_input("", shape, BATCH)
    y = targets(model, x)
    u = per_example(model, model.layers[-1].alpha, x, y)
    step = train_once(model, x, y, solver=solver, damping=0.2)
    block = step.of("block")
    assert set(block) == {"G"}
    diagonal = np.mean(u**2, axis=0)
    assert_close(block["G"], diagonal, 1e-5, "G")
    want = u.mean(0) / (diagonal + 0.2)
    assert_close(step.delta[0].ravel(), want, 1e-5, "step")


def test_as_the_activation_of_a_layer() -> None:
    """Both have a block, and the layer's G is before its activation."""
    prelu = layers.PReLU(name="slopes")
    dense = layers.Dense(3, activation=prelu, name="dense")
    model = keras.Sequential([keras.Input((4,)), dense])
    randomize(model)
    x = make_input("", (4,), BATCH)
    y = targets(model, x)
    slopes = per_example(model, prelu.alpha, x, y)
    biases = per_example(model, dense.bias, x, y)
    step = train_once(model, x, y, eager=False)
    G = np.mean(slopes**2, axis=0)
    assert_close(step.of("slopes")["G"], G, 1e-5, "G of the slopes")
    G = biases.T @ biases / BATCH
    assert_close(step.of("dense")["G"], G, 1e-5, "G of the layer")
