"""Replicas of one process do not deadlock on assertions and prints.

`MirroredStrategy` has one graph for all replicas, and TensorFlow runs stateful
operations in program order. An assertion in the second replica's loss waited
for a print in the first replica's step, which waits for a sum over both.
"""

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.marks import with_slow
from tests.support.schedules import Formula
from tests.support.strategies import copies, strategy

STEPS, ROWS, POSITIONS, TOKENS = 3, 8, 3, 6


def kfac(**kwargs: Any) -> Any:
    clocks = {"factor_update_interval": 1, "inverse_update_interval": 2}
    options = {"fisher": "empirical", **clocks, **kwargs}
    return tfkfac.KFAC(keras.optimizers.SGD(0.1), **options)


def fosi(**kwargs: Any) -> Any:
    return tfkfac.FOSI(
        keras.optimizers.SGD(0.1),
        num_largest=2,
        warmup_steps=1,
        update_interval=2,
        **kwargs,
    )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "eigen": lambda: kfac(solver="eigen"),
    "schedule": lambda: kfac(damping=Formula(watched_damping)),
    "gauss-newton": tfkfac.GaussNewton,
    "fosi": fosi,
    "accelerator": lambda: fosi(accelerator_fraction=0.5),
}


def watched(tensor: Any) -> Any:
    """Return a tensor that waits for Python, a print and an assertion."""
    largest = tf.reduce_max(tf.abs(tf.cast(tensor, tf.float32)))
    largest = tf.numpy_function(lambda x: x, [largest], tf.float32)
    printed = tf.print("largest", largest, output_stream=sys.stdout)
    asserted = tf.debugging.assert_less(largest, 1e6)
    with tf.control_dependencies([printed, asserted]):
        return tf.identity(tensor)


def watched_damping(update: Any) -> Any:
    return 0.01 + 0.0 * watched(tf.cast(update, tf.float32))


class Watched(layers.Layer):
    """Prints and asserts in the forward and backward pass."""

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def both(x: Any) -> Any:
            return watched(x), watched

        return both(inputs)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class WatchedMean(keras.metrics.Mean):
    def update_state(self, y: Any, outputs: Any, **kwargs: Any) -> Any:
        return super().update_state(watched(outputs))


class WatchedModel(keras.Model):
    """Prints and asserts on the data, and on the new weights."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(tf.nest.map_structure(watched, data))
        kernel = self.trainable_variables[-2].value
        return {**logs, "largest": watched(tf.convert_to_tensor(kernel))}


def network(case: str) -> Any:
    """Two dense layers on tokens, vectors, or numbers for a lookup table."""
    if case == "table":
        inputs = keras.Input((POSITIONS,), dtype="int64")
        table = layers.IntegerLookup(vocabulary=list(range(TOKENS)))
        embedded = layers.Embedding(TOKENS + 1, 3, name="embedding")
        hidden = layers.Flatten()(embedded(table(inputs)))
    else:
        inputs = keras.Input((POSITIONS, 5) if case == "tokens" else (5,))
        hidden = inputs
    hidden = layers.Dense(6, activation="tanh", name="hidden")(hidden)
    if case == "watched":
        hidden = Watched()(hidden)
    outputs = layers.Dense(3, name="out")(hidden)
    cls = WatchedModel if case == "watched" else keras.Model
    return cls(inputs, outputs)


def data(case: str) -> tuple[Any, Any]:
    rng, rows = np.random.default_rng(0), STEPS * ROWS
    if case == "table":
        x = rng.integers(0, TOKENS, (rows, POSITIONS))
        return x, rng.integers(0, 3, rows)
    x = rng.normal(size=(rows, POSITIONS, 5))
    y = rng.integers(0, 3, (rows, POSITIONS))
    if case == "tokens":
        return x, y
    return x[:, 0], y[:, 0]


def train(case: str, optimizer: str) -> list[list[Any]]:
    """Train; return the weights of each replica.

    Args:
        case: "tokens", labels with positions, on which Keras has an assertion;
            "watched", layers, metrics and a model that print and assert; or
            "table", a lookup table.
        optimizer: Key of `OPTIMIZERS`.
    """
    with floats("float64"):
        with strategy().scope():
            keras.utils.set_random_seed(0)
            model = network(case)
            model.compile(
                OPTIMIZERS[optimizer](),
                keras.losses.SparseCategoricalCrossentropy(True),
                metrics=[WatchedMean()] if case == "watched" else None,
            )
        # The size of a batch is open.
        batches = tf.data.Dataset.from_tensor_slices(data(case)).batch(ROWS)
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
            model = network("tokens")
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
    x, _ = data("tokens")
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


# In float64 but for Lanczos vectors. An accelerator does not train, which
# differs from one process.
TOLERANCES = {
    ("tokens", "eigen"): 1e-9,
    ("watched", "fosi"): 1e-5,
    ("watched", "schedule"): 1e-9,
    ("watched", "accelerator"): None,
    ("watched", "gauss-newton"): 1e-6,
    ("table", "fosi"): 1e-5,
}
RUNS = {f"mirrored: {', '.join(run)}": run for run in TOLERANCES}


@pytest.mark.parametrize("name", with_slow(RUNS, *[*RUNS][1:]))
def test_training_ends_as_with_one_replica(on_workers: Any, name: str) -> None:
    """Replicas have equal bits and match a single replica."""
    case, optimizer = RUNS[name]
    ((first, second),) = on_workers("mirrored", train, case, optimizer)
    np.testing.assert_equal(first, second)
    assert all(np.isfinite(value).all() for value in first)
    tolerance = TOLERANCES[case, optimizer]
    if tolerance is not None:
        (expected,) = train(case, optimizer)
        for ours, theirs in zip(first, expected, strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=tolerance, atol=tolerance
            )
