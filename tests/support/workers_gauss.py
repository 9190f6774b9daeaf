"""What the tests of Gauss-Newton under several replicas run.

`train` runs one small job and returns all there is to know about it. The same
function gives what a single process gets, which sees each step's rows of all
workers as one batch.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import worker_parts
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.strategies import copies, strategy
from tests.support.worker_parts import FEEDS, shares
from tests.support.workers_modes import dataset


def regression() -> keras.Model:
    penalty = keras.regularizers.L2(2**-6)
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Flatten(),
            layers.Dense(3, "tanh", kernel_regularizer=penalty, name="hidden"),
            layers.Dense(2, name="values"),
        ]
    )


LOSSES: dict[str, Callable[[], Any]] = {
    "regression": keras.losses.MeanSquaredError,
    "small": lambda: keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    ),
}
MODELS = {"regression": regression, "small": worker_parts.small}


class Noted(keras.callbacks.Callback):
    """Remembers what each step did."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(self.model.optimizer.last_step)


def train(
    kind: str | None,
    model: str,
    poison: tuple[int, int] | None = None,
    without: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a new model in float64 for the steps of an uneven feed.

    Args:
        kind: "multi", "mirrored", or None for a single process.
        model: One of `MODELS`.
        poison: Step, and the worker whose rows are NaN in it.
        without: A step to leave out.
        **options: Arguments of `GaussNewton`.
    """
    workers = strategy(kind).num_replicas_in_sync
    with floats("float64"):
        with strategy(kind).scope():
            keras.utils.set_random_seed(0)
            network: Any = MODELS[model]()
            optimizer = tfkfac.GaussNewton(**options)
            network.compile(optimizer, LOSSES[model]())
        x, y = worker_parts.images()
        if model == "regression":
            y = targets(x)
        steps = shares(FEEDS["uneven"](), workers)
        if without is not None:
            del steps[without]
        start, noted = network.get_weights(), Noted()
        network.fit(
            dataset(kind, x, y, steps, poison),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
            callbacks=[noted],
        )
        states = optimizer.method.states
        return {
            "start": start,
            "weights": network.get_weights(),
            "copies": copies(kind, network.variables),
            "steps": noted.steps,
            "dampings": [float(s.damping.numpy()) for s in states],
            "previous": [s.previous.numpy() for s in states],
            "skipped": [int(s.numpy()) for s in optimizer._job.skipped],
            "bytes": optimizer.communication_bytes(),
        }


def targets(x: Array) -> Array:
    rng = np.random.default_rng(1)
    flat = x.reshape(len(x), -1)
    return np.tanh(flat @ rng.normal(size=(flat.shape[1], 2)))


# Of the conditions of `Decay`.
WEIGHTS = {"seen": 3.0, "both": 0.5}


class Decay:
    """The equation `u' = -rate u`, with an unknown rate; u is exp(-2 x)."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(1)
        hidden, last = layers.Dense(3, "tanh"), layers.Dense(1)
        self.network = keras.Sequential([keras.Input((1,)), hidden, last])
        self.rate = keras.Variable(1.0, dtype=keras.config.floatx())
        self.variables = [*self.network.trainable_variables, self.rate]
        x = [np.linspace(0, 1, n)[:, None] for n in (12, 3, 5)]
        self.points = {"slope": x[0], "both": x[1], "seen": x[2]}
        self.residuals = {
            "slope": self.slope,
            "both": lambda x: tf.concat([self.error(x)] * 2, 1),
            "seen": self.error,
        }

    def error(self, x: Any) -> Any:
        return self.network(x) - tf.exp(-2 * x)

    def slope(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            u = self.network(x)[:, 0]
        return tape.gradient(u, x)[:, 0] + self.rate * u

    def minimize(self, optimizer: tfkfac.GaussNewton, **options: Any) -> Any:
        return optimizer.minimize(
            self.residuals,
            self.variables,
            self.points,
            weights=WEIGHTS,
            **options,
        )


def conditions(kind: str | None) -> dict[str, Any]:
    """Five steps of `minimize`, in float64; points are left over for some."""
    with floats("float64"), strategy(kind).scope():
        problem = Decay()
        start = [np.array(v) for v in problem.variables]
        optimizer = tfkfac.GaussNewton(solve="parameters")
        problem.minimize(optimizer, steps=5)
        return {
            "start": start,
            "weights": [np.array(v) for v in problem.variables],
            "copies": copies(kind, problem.variables),
            "last": optimizer.last_step,
        }


def seconds(kind: str | None) -> str:
    """Asks `minimize` for seconds, of which each process has its own."""
    with strategy(kind).scope():
        try:
            Decay().minimize(tfkfac.GaussNewton(), seconds=1)
        except ValueError as error:
            return str(error)
    return "trained"


def refusal(kind: str | None) -> str:
    """Trains on images of which a single one is too large, for its weights."""
    with strategy(kind).scope():
        network: Any = keras.Sequential(
            [
                keras.Input((64, 64, 1)),
                layers.Conv2D(4, 3, activation="tanh"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )
        network.compile(tfkfac.GaussNewton(max_bytes=130_000), "mse")
    try:
        network.fit(np.ones((8, 64, 64, 1)), np.ones((8, 1)), verbose=0)
    except ValueError as error:
        return str(error)
    return "trained"
