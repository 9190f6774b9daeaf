"""What the tests of Gauss-Newton under several replicas run.

`train` runs one small job and returns all there is to know about it. The same
function gives what a single process gets, which sees each step's rows of all
workers as one batch.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
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
