"""Blocks that join when others have been trained for a while."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close, find, randomize, weights_of
from tests.support.reference import (
    SOLVES,
    Array,
    append_one,
    factors,
    gradient,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3)).astype("float32")
Y = RNG.normal(size=(20, 2)).astype("float32")
DAMPING = 0.01


def network() -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh", name="first"),
            layers.Dense(2, name="last"),
        ]
    )
    randomize(model)
    return model


def rows_of(model: Any, x: Array, y: Array) -> dict[str, tuple[Array, Array]]:
    """Inputs and gradients of half the squared error, by layer."""
    one, two = (np.vstack(weights_of(layer)) for layer in model.layers)
    a1 = append_one(x.astype(np.float64))
    hidden = np.tanh(a1 @ one)
    a2 = append_one(hidden)
    g2 = a2 @ two - y
    g1 = (g2 @ two[:-1].T) * (1 - hidden**2)
    return {
        "first": (a1[:, None], g1[:, None]),
        "last": (a2[:, None], g2[:, None]),
    }


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize("eager", [True, False])
def test_its_first_step_is_of_its_own_statistics(
    eager: bool, solver: str
) -> None:
    """Not 1/damping times its gradient, not the gradient either."""
    model = network()
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(1e-3),
        solver=solver,
        damping=DAMPING,
        kl_clip=None,
        factor_update_interval=10,
        inverse_update_interval=10,
    ).attach(model)
    optimizer.build(model.trainable_variables)

    def step(trained: Sequence[Any], x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = 0.5 * tf.reduce_sum(tf.square(model(x) - y)) / 4
        grads = tape.gradient(loss, [v.value for v in trained])
        optimizer.apply(grads, trained)

    last, everything = model.layers[1].trainable_variables, model.weights
    stages = [last] * 7 + [everything] * 2
    steps = {}
    for trained in (last, everything):
        once = functools.partial(step, trained)
        steps[id(trained)] = once if eager else tf.function(once)
    start = rows_of(model, X[:4], Y[:4])["last"]
    early = factors(*start)
    for i, trained in enumerate(stages):
        before = [w.copy() for w in weights_of(model.layers[0])]
        rows = slice(2 * i, 2 * i + 4)
        a, g = rows_of(model, X[rows], Y[rows])["first"]
        steps[id(trained)](X[rows], Y[rows])
        after = weights_of(model.layers[0])
        if trained is last:
            np.testing.assert_array_equal(np.vstack(after), np.vstack(before))
            continue
        if i == 7:  # what it has joined with stays in use until step 10
            A, G = factors(a, g)
        want = SOLVES[solver](gradient(a, g), A, G, DAMPING)
        moved = (np.vstack(before) - np.vstack(after)) / 1e-3
        assert_close(moved, want, 2e-3)
        # The other keeps its clock: its factors are those of step 0.
        for got, value in zip(
            find(optimizer.factors(), "last").values(), early, strict=True
        ):
            assert_close(got, value, 1e-4)
    assert int(optimizer.factor_updates) == 2


def test_a_layer_that_is_unfrozen() -> None:
    """Compiled anew with one optimizer: as above, in `fit`."""
    model = network()
    model.layers[0].trainable = False
    options = {"factor_update_interval": 10, "inverse_update_interval": 10}
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(1e-3),
        fisher="empirical",
        kl_clip=None,
        damping=DAMPING,
        **options,
    )
    optimizer.attach(model)
    optimizer.build(model.layers[0].weights + model.layers[1].weights)
    model.compile(optimizer, "mse")
    for _ in range(3):
        model.train_on_batch(X[:4], Y[:4])
    model.layers[0].trainable = True
    model.compile(optimizer, "mse")
    before = np.vstack(weights_of(model.layers[0]))
    a, g = rows_of(model, X[4:8], Y[4:8])["first"]
    model.train_on_batch(X[4:8], Y[4:8])
    want = SOLVES["inverse"](gradient(a, g), *factors(a, g), DAMPING)
    moved = (before - np.vstack(weights_of(model.layers[0]))) / 1e-3
    assert_close(moved, want, 2e-3)
