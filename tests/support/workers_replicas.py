"""Replicas of one process in whose graph users assert, print and look up."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.schedules import Formula
from tests.support.strategies import copies, strategy
from tfkfac.cluster import watch
from tfkfac.compat.strategies import order_by_replica

STEPS, ROWS, POSITIONS, TOKENS = 3, 8, 3, 6
_DENSE = {"factor_update_interval": 1, "inverse_update_interval": 2}


def kfac(**kwargs: Any) -> Any:
    inner = keras.optimizers.SGD(0.1)
    return tfkfac.KFAC(inner, **{"fisher": "empirical", **_DENSE, **kwargs})


def fosi(**kwargs: Any) -> Any:
    return tfkfac.FOSI(
        keras.optimizers.SGD(0.1),
        num_largest=2,
        warmup_steps=1,
        update_interval=2,
        **kwargs,
    )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "inverse": kfac,
    "eigen": lambda: kfac(solver="eigen"),
    "drawn labels": lambda: kfac(fisher="monte_carlo"),
    "mem_opt": lambda: kfac(distribution="mem_opt"),
    "schedule": lambda: kfac(damping=Formula(loud_damping)),
    "gauss-newton": tfkfac.GaussNewton,
    "fosi": fosi,
    "accelerator": lambda: fosi(accelerator_fraction=0.5),
}


def watched(tensor: Any) -> Any:
    """A tensor that waits for Python, a print and an assertion on it."""
    largest = tf.reduce_max(tf.abs(tf.cast(tensor, tf.float32)))
    largest = tf.numpy_function(lambda x: x, [largest], tf.float32)
    said = tf.print("largest", largest, output_stream=sys.stdout)
    right = tf.debugging.assert_less(largest, 1e6)
    with tf.control_dependencies([said, right]):
        return tf.identity(tensor)


def loud_damping(update: Any) -> Any:
    return 0.01 + 0.0 * watched(tf.cast(update, tf.float32))


class Watched(layers.Layer):
    """Looks at what goes through it, forwards and backwards."""

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def both(x: Any) -> Any:
            return watched(x), watched

        return both(inputs)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class WatchedMean(keras.metrics.Mean):
    def update_state(self, *given: Any, **kwargs: Any) -> Any:
        return super().update_state(watched(given[1]))


class WatchedModel(keras.Model):
    """Asserts of the data, and in the end of the new weights."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(tf.nest.map_structure(watched, data))
        kernel = self.trainable_variables[-2].value
        return {**logs, "largest": watched(tf.convert_to_tensor(kernel))}


def asserting_loss(y_true: Any, y_pred: Any) -> Any:
    same = tf.debugging.assert_equal(tf.shape(y_true), tf.shape(y_pred))
    with tf.control_dependencies([same]):
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)


def network(case: str) -> Any:
    """Two dense layers, of tokens, vectors, or numbers to look up."""
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
    kind = WatchedModel if case == "watched" else keras.Model
    return kind(inputs, outputs)


def data(case: str) -> tuple[Any, Any]:
    rng, rows = np.random.default_rng(0), STEPS * ROWS
    if case == "table":
        x = rng.integers(0, TOKENS, (rows, POSITIONS))
        return x, rng.integers(0, 3, rows)
    x = rng.normal(size=(rows, POSITIONS, 5))
    y = rng.integers(0, 3, (rows, POSITIONS))
    if case == "tokens":
        return x, y
    labels = y[:, 0]
    return x[:, 0], np.eye(3)[labels] if case == "assertion" else labels


def train(kind: str | None, case: str, optimizer: str) -> list[list[Any]]:
    """The weights of each replica of a small model that was trained.

    Of the cases, "tokens" has labels of batch and positions, of which Keras
    asserts something; "assertion" a loss that asserts; in "watched" everything
    of the user's prints and asserts; "table" looks up.
    """
    with floats("float64"):
        with strategy(kind).scope():
            keras.utils.set_random_seed(0)
            model = network(case)
            loss: Any = keras.losses.SparseCategoricalCrossentropy(True)
            model.compile(
                OPTIMIZERS[optimizer](),
                asserting_loss if case == "assertion" else loss,
                metrics=[WatchedMean()] if case == "watched" else None,
            )
        # The size of a batch is open.
        batches = tf.data.Dataset.from_tensor_slices(data(case)).batch(ROWS)
        model.fit(batches, shuffle=False, verbose=0)
    return copies(kind, model.trainable_variables)


def train_eagerly(kind: str) -> dict[str, str]:
    """Errors of replicas without a graph, by where it is refused."""
    errors = {}

    def refused(where: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except ValueError as error:
            errors[where] = str(error)

    def compiled(eager: bool) -> Any:
        with strategy(kind).scope():
            model = network("tokens")
            model.compile(tfkfac.KFAC(), "mse", run_eagerly=eager)
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
    refused("loop", lambda: strategy(kind).run(step, args=(loop, x[:ROWS])))
    return errors


# ------------------------------------------------------------------- order
def orders(kind: str, apart: bool) -> dict[str, list[str]]:
    """The operations of two replicas that wait for one that prints or looks up.

    For each operation of the first replica, then of the second, those of them
    that it waits for. Each replica prints, forwards and backwards, on a device
    of the user's and out of its scope, and looks something up.
    """
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], [2, 3]), -1
    )

    @tf.custom_gradient
    def loud(x: Any) -> Any:
        def backwards(upstream: Any) -> Any:
            tf.print("backwards")
            return upstream

        return x, backwards

    def step(x: Any) -> Any:
        if apart:
            order_by_replica(strategy(kind).extended.worker_devices)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loud(x)
        tf.print("first")
        with tf.device("CPU:0"):
            tf.print("placed")
        with tf.name_scope("out/of/it/"):
            tf.print("named")
        return tape.gradient(y, x), table.lookup(tf.constant(0))

    @tf.function
    def run() -> Any:
        return strategy(kind).run(step, args=(tf.constant(1.0),))

    operations = run.get_concrete_function().graph.get_operations()
    found = {
        operation.name: operation
        for operation in operations
        if operation.type in ("PrintV2", "LookupTableFindV2")
    }
    return {
        name: [o.name for o in operation.control_inputs if o.name in found]
        for name, operation in found.items()
    }


# -------------------------------------------------------------- standstill
def stand_still(kind: str) -> str:
    """What is said of a `fit` whose data do not come for some time."""

    def slow_rows() -> Iterator[Any]:
        x, y = data("vectors")
        for step in range(3):
            time.sleep(3.0 if step == 2 else 0)
            yield x[:ROWS], y[:ROWS]

    with strategy(kind).scope():
        model = network("vectors")
        model.compile(
            kfac(),
            keras.losses.SparseCategoricalCrossentropy(True),
        )
    signature = (
        tf.TensorSpec([None, 5], tf.float32),
        tf.TensorSpec([None], tf.int64),
    )
    batches = tf.data.Dataset.from_generator(
        slow_rows, output_signature=signature
    )
    said = io.StringIO()
    with (
        mock.patch.object(watch, "_STALL_TIMEOUT_S", 1.0),
        mock.patch.object(watch, "_ANSWER_TIMEOUT_S", 0.1),
        contextlib.redirect_stderr(said),
    ):
        model.fit(batches, shuffle=False, verbose=0)
    return said.getvalue()
