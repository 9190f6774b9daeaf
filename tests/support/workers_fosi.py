"""What the tests of FOSI under several replicas run, alone and on workers.

`train` runs one small job, in one or several calls of `fit`, and returns all
there is to know about it. The same function gives what a single process gets,
which sees each step's rows of all workers as one batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import worker_parts
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.worker_parts import (
    CLASSES,
    FEEDS,
    RATE,
    images,
    sentences,
    shares,
)
from tests.support.workers_modes import dataset

Changes = Mapping[int, Mapping[str, Any]]
Fits = Sequence[tuple[int, int]]

# ------------------------------------------------------------------ models
LARGE = 20_000  # weights


def mlp() -> keras.Model:
    """Of 165 weights, which neither 2 nor 4 divides."""
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Flatten(),
            layers.Dense(3, activation="tanh", name="hidden"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


def plain_norm() -> keras.Model:
    return convolution(layers.BatchNormalization(momentum=0.5, name="norm"))


def batch_norm() -> keras.Model:
    return convolution(
        layers.BatchNormalization(momentum=0.5, synchronized=True, name="norm")
    )


def convolution(norm: layers.Layer) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(2, 3, name="conv"),
            norm,
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


def large() -> keras.Model:
    return keras.Sequential([keras.Input((199,)), layers.Dense(100)])


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{f.__name__: f for f in (mlp, plain_norm, batch_norm, large)},
    "text": worker_parts.text,
}

# -------------------------------------------------------------- optimizers
INNERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    **worker_parts.INNERS,
    "plain": lambda: keras.optimizers.SGD(RATE),
    "decaying": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PolynomialDecay(RATE, 12, 0.0), 0.5
    ),
}
# Few Lanczos steps: their number does not matter where two jobs do the same.
DEFAULTS: dict[str, Any] = {
    "num_largest": 2,
    "num_smallest": 1,
    "alpha": 0.25,
    "update_interval": 2,
    "warmup_steps": 2,
    "lanczos_steps": 5,
    "learning_rate_clip": 3.0,
}


class Observer(keras.callbacks.Callback):
    """Changes the optimizer between steps, and looks at ends of epochs."""

    def __init__(self, kind: str | None, changes: Changes) -> None:
        super().__init__()
        self.kind = kind
        self.changes = changes
        self.steps = 0
        self.copies: list[list[list[Array]]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for name, value in self.changes.get(self.steps, {}).items():
            setattr(self.model.optimizer, name, value)
        self.steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.copies.append(copies(self.kind, self.model.variables))


# ---------------------------------------------------------------- training
def train(
    kind: str | None,
    model: str,
    inner: str = "sgd",
    feed: str = "uneven",
    dtype: str = "float64",
    poison: tuple[int, int] | None = None,
    without: int | None = None,
    changes: Changes | None = None,
    fits: Fits | None = None,
    evaluated: int = 0,
    eager: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains a new model on the steps of a feed.

    Args:
        kind: "multi", "mirrored", or None for a single process.
        model: One of `MODELS`.
        inner: One of `INNERS`.
        feed: One of `FEEDS`.
        dtype: Keras' default dtype.
        poison: Step, and the worker whose rows are NaN in it.
        without: A step to leave out.
        changes: Values for the optimizer's attributes before a step.
        fits: Epochs and steps of each for each call of `fit`.
        evaluated: Number of steps whose rows are for `evaluate`.
        eager: Whether to run without a graph.
        **options: Arguments of `FOSI`.
    """
    steps = shares(FEEDS[feed](), strategy(kind).num_replicas_in_sync)
    if without is not None:
        del steps[without]
    observer = Observer(kind, changes or {})
    with floats(dtype):
        network = compiled(kind, model, inner, options)
        network.run_eagerly = eager
        rows = data(model, dtype)
        start = [v.numpy() for v in network.trainable_variables]
        fits = fits or [(1, len(steps))]
        history = run_fits(network, rows, steps, fits, poison, observer)
        batches = dataset(kind, *rows, steps[:evaluated], None)
        found = {
            "start": start,
            "history": history,
            "evaluation": evaluated
            and run_evaluate(network, batches, evaluated),
            "epochs": observer.copies,
        }
    return found | describe(kind, network)


def run_evaluate(network: Any, batches: Any, length: int) -> dict[str, float]:
    return network.evaluate(batches, steps=length, return_dict=True, verbose=0)


def run_fits(
    network: Any,
    rows: tuple[Array, Array],
    steps: list[Any],
    fits: Fits,
    poison: tuple[int, int] | None,
    observer: Observer,
) -> list[dict[str, float]]:
    """One call of `fit` after the other; the metrics of all epochs."""
    history, begin = [], 0
    for epochs, length in fits:
        end = begin + epochs * length
        bad = poison and (poison[0] - begin, poison[1])
        batches = dataset(observer.kind, *rows, steps[begin:end], bad)
        history += run_fit(network, batches, epochs, length, observer)
        begin = end
    return history


def data(model: str, dtype: str) -> tuple[Array, Array]:
    if model == "text":
        return sentences()
    x, y = images()
    return x.astype(dtype), y


def compiled(
    kind: str | None, model: str, inner: str, options: Mapping[str, Any]
) -> Any:
    with strategy(kind).scope():
        keras.utils.set_random_seed(0)
        network = MODELS[model]()
        network.compile(
            tfkfac.FOSI(INNERS[inner](), **(DEFAULTS | dict(options))),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return network


def run_fit(
    network: Any, batches: Any, epochs: int, length: int, observer: Observer
) -> list[dict[str, float]]:
    """The metrics of each epoch."""
    logs = network.fit(
        batches,
        epochs=epochs,
        steps_per_epoch=length,
        shuffle=False,
        verbose=0,
        callbacks=[observer],
    ).history
    return [{k: v[i] for k, v in logs.items()} for i in range(epochs)]


def told(kind: str | None) -> list[int]:
    """The warm-up of each replica, where workers hear other lengths."""
    options = {"warmup_steps": None}
    with strategy(kind).scope():
        optimizer = compiled(kind, "mlp", "sgd", options).optimizer
    optimizer.method.expect(40 * (1 + local_ranks(kind)[0]))
    return [int(state.warmup) for state in optimizer.method.states]


def describe(kind: str | None, model: Any) -> dict[str, Any]:
    """All that the tests want to know of a trained model."""
    optimizer = model.optimizer
    text: list[str] = []
    optimizer.summary(print_fn=text.append)
    kept = [s.subspace for s in optimizer.method.states]
    return {
        "ranks": local_ranks(kind),
        "weights": [v.numpy() for v in model.trainable_variables],
        "statistics": [v.numpy() for v in model.non_trainable_variables],
        "copies": copies(kind, [*model.variables, *optimizer.variables]),
        "iterations": int(optimizer.iterations.numpy()),
        "skipped": [int(v) for v in optimizer.method.job.skipped],
        "estimations": [int(s.estimations) for s in optimizer.method.states],
        "failures": [int(s.failures) for s in optimizer.method.states],
        "ritz_values": [s and s.ritz_values.numpy() for s in kept],
        "shapes": [s and tuple(s.directions.shape) for s in kept],
        "spectrum": optimizer.spectrum(),
        "state_bytes": optimizer.state_bytes(),
        "kept_bytes": sum(
            bytes_of(v) for v in variables_in(optimizer.method.states[0])
        ),
        "communication_bytes": optimizer.communication_bytes(),
        "idle_share": optimizer.idle_share(),
        "summary": "\n".join(text),
    }


def variables_in(thing: Any) -> list[Any]:
    """All variables in an object's attributes, lists and tuples."""
    if isinstance(thing, tf.Variable):
        return [thing]
    parts = list(thing) if isinstance(thing, (list, tuple)) else []
    if type(thing).__module__.startswith("tfkfac.fosi"):
        parts += vars(thing).values()
    return [v for part in parts for v in variables_in(part)]


def bytes_of(variable: tf.Variable) -> int:
    array = variable.numpy()
    if array.dtype == object:
        return sum(map(len, array.ravel()))
    return int(array.nbytes)


# ---------------------------------------------------------------- refusals
def disagreement(
    kind: str, argument: str, values: Sequence[Any]
) -> tuple[str, int]:
    """What is said when workers have other settings, after how many steps."""
    (rank,) = local_ranks(kind)
    observer = Observer(kind, {})
    steps = shares(FEEDS["even"](), strategy(kind).num_replicas_in_sync)
    with floats("float64"):
        batches = dataset(kind, *data("mlp", "float64"), steps, None)
        try:
            network = compiled(kind, "mlp", "sgd", {argument: values[rank]})
            run_fit(network, batches, 1, len(steps), observer)
        except ValueError as error:
            return str(error), max(observer.steps - 1, 0)
    return "", observer.steps


def fractions_refused(
    kind: str | None, fractions: Sequence[float]
) -> list[str]:
    """What `compile` says to fractions of accelerators."""
    found = []
    for fraction in fractions:
        try:
            compiled(kind, "mlp", "sgd", {"accelerator_fraction": fraction})
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def traffic(kind: str | None, layout: str) -> dict[str, dict[str, int]]:
    """What a step of a large model moves; not trained."""
    with strategy(kind).scope():
        network = large()
        network.compile(tfkfac.FOSI(num_largest=10, layout=layout), "mse")
    assert network.count_params() == LARGE
    assert tf.distribute.get_replica_context() is not None
    return network.optimizer.communication_bytes()
