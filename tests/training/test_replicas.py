"""Replicas of one process do not deadlock on assertions and prints.

`MirroredStrategy` has one graph for all replicas, and TensorFlow runs stateful
operations in program order. An assertion in the second replica's loss waited
for a print in the first replica's step, which waits for a sum over both.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.strategies import copies, strategy

STEPS, ROWS, POSITIONS = 3, 8, 3


def network() -> Any:
    """Two dense layers on tokens."""
    hidden = layers.Dense(6, activation="tanh")
    return keras.Sequential(
        [keras.Input((POSITIONS, 5)), hidden, layers.Dense(3)]
    )


def data() -> tuple[Any, Any]:
    rng, rows = np.random.default_rng(0), STEPS * ROWS
    x = rng.normal(size=(rows, POSITIONS, 5))
    return x, rng.integers(0, 3, (rows, POSITIONS))


def train() -> list[list[Any]]:
    """Train on labels with positions, on which Keras has an assertion.

    Return the weights of each replica.
    """
    with strategy().scope():
        model = network()
        model.compile(
            tfkfac.KFAC(0.1), keras.losses.SparseCategoricalCrossentropy(True)
        )
    # The size of a batch is open.
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(ROWS)
    model.fit(batches, shuffle=False, verbose=0)
    return copies(model.trainable_variables)


def train_eagerly() -> dict[str, str]:
    """Return errors of replicas without a graph, by where it is refused."""
    errors = {}

    def refused(where: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except ValueError as error:
            errors[where] = str(error)

    def compiled(eager: bool) -> Any:
        with strategy().scope():
            model = network()
            model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=eager)
        return model

    def step(model: Any, x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))

    refused("compile", lambda: compiled(True))
    later = compiled(False)
    later.run_eagerly = True
    x, _ = data()
    y = np.zeros((len(x), POSITIONS, 3))
    refused("fit", lambda: later.fit(x, y, ROWS, verbose=0))
    loop = compiled(False)
    refused("loop", lambda: strategy().run(step, args=(loop, x[:ROWS])))
    return errors


@pytest.mark.parametrize("where", ["mirrored"])
def test_several_eager_replicas_are_refused(
    on_workers: Any, where: str
) -> None:
    """By `compile`, and by the first step where they become eager later."""
    (errors,) = on_workers(where, train_eagerly)
    assert errors.keys() == {"compile", "fit", "loop"}
    for error in errors.values():
        assert "Argument `run_eagerly` of `compile` must be False" in error
        assert "one replica in each process" in error


@pytest.mark.parametrize("where", ["mirrored"])
def test_an_assertion_in_the_loss(on_workers: Any, where: str) -> None:
    """Replicas have equal bits; see compat/test_strategies.py for prints."""
    ((first, second),) = on_workers(where, train)
    np.testing.assert_equal(first, second)
    assert all(np.isfinite(value).all() for value in first)
