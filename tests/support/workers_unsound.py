"""Jobs of several workers in which numbers go wrong, and what is left."""

import contextlib
import io
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import tfkfac
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.worker_parts import (
    DEFAULTS,
    FEEDS,
    INNERS,
    MODELS,
    images,
    shares,
)
from tests.support.workers_modes import compiled, dataset
from tfkfac.compat.graphs import replica_copy
from tfkfac.supervision import comparison

STEPS, BAD = 8, 5
Steps = list[list[list[int]]]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "kfac": lambda: tfkfac.KFAC(INNERS["sgd"](), **DEFAULTS),
    "fosi": lambda: tfkfac.FOSI(INNERS["adam"](), warmup_steps=1),
    "dp_kfac": lambda: tfkfac.KFAC(
        INNERS["sgd"](), distribution="dp_kfac", **DEFAULTS
    ),
    "accelerator": lambda: tfkfac.FOSI(
        INNERS["adam"](), warmup_steps=1, accelerator_fraction=0.5
    ),
}


def even(kind: str | None, steps: int = STEPS) -> Steps:
    return shares(FEEDS["even"](), strategy(kind).num_replicas_in_sync)[:steps]


def network(
    kind: str | None,
    optimizer: Callable[[], Any],
    model: str = "small",
    **options: Any,
) -> Any:
    with strategy(kind).scope():
        keras.utils.set_random_seed(0)
        built = MODELS[model]()
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(optimizer(), entropy, **options)
    return built


def fit(
    kind: str | None,
    model: Any,
    steps: Steps,
    x: Array | None = None,
    *callbacks: keras.callbacks.Callback,
) -> dict[str, list[float]]:
    """Trains on the rows of each step; returns the history."""
    good, y = images()
    history: dict[str, list[float]] = model.fit(
        dataset(kind, good if x is None else x, y, steps, None),
        steps_per_epoch=len(steps),
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history
    return history


def end_before_others(kind: str, folder: str) -> bool:
    """Returns whether worker 0 leaves `fit` while others are in a callback."""
    has_ended = pathlib.Path(folder) / "ended"
    worker = strategy(kind).cluster_resolver.task_id

    def wait(epoch: int, logs: Any) -> None:
        deadline = time.monotonic() + 30
        while worker and not has_ended.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        in_time.append(not worker or has_ended.exists())

    in_time: list[bool] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=wait)
    fit(kind, network(kind, OPTIMIZERS["kfac"]), even(kind, 2), None, callback)
    has_ended.touch()
    return in_time == [True]


# ------------------------------------------------- what is broken from outside
class Spoiler(keras.callbacks.Callback):
    """Breaks something before a step, and says how far each step goes."""

    def __init__(self, tensors: Callable[[Any], Sequence[Any]]) -> None:
        super().__init__()
        self._tensors = tensors
        self._weights: list[list[Array]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._weights.append(self.model.get_weights())
        if batch == BAD:
            for tensor in self._tensors(self.model.optimizer.method.states):
                tensor.assign(np.full(tensor.shape, np.nan))

    def moves(self) -> list[float]:
        return [
            max(float(np.abs(b - a).max()) for a, b in zip(*pair, strict=True))
            for pair in zip(self._weights, self._weights[1:], strict=False)
        ]


def spoil(
    kind: str | None,
    what: str,
    model: str = "small",
    path: str = "hidden",
    **options: Any,
) -> dict[str, Any]:
    """Trains, and breaks a "decomposition" or "factor" of a layer."""

    def tensors(states: Any) -> list[Any]:
        mine = [
            one
            for state in states
            for one in state.preconditioners
            if one.block.path.endswith(path)
        ]
        if what == "factor":
            kept = [one.factors.averages for one in mine if one.factors]
        else:
            kept = [o.decomposition.tensors for o in mine if o.decomposition]
        return [tensor for found in kept for tensor in found]

    spoiler = Spoiler(tensors)
    with floats("float64"):
        trained = compiled(kind, model, "sgd", options)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            fit(kind, trained, even(kind), None, spoiler)
    optimizer = trained.optimizer
    return {
        "said": said.getvalue(),
        "weights": trained.get_weights(),
        "moves": spoiler.moves(),
        "copies": copies(kind, [*trained.variables, *optimizer.variables]),
        "events": optimizer.events(),
        "iterations": int(optimizer.iterations.numpy()),
    }


def lose(kind: str, inner: str, tensor: str, **options: Any) -> dict[str, Any]:
    """Trains, and breaks what one worker has of FOSI's directions."""

    def tensors(states: Any) -> list[Any]:
        mine = zip(local_ranks(kind), states, strict=True)
        return [getattr(s.subspace, tensor) for rank, s in mine if rank == 1]

    def optimizer() -> Any:
        return tfkfac.FOSI(
            INNERS[inner](),
            num_largest=3,
            lanczos_steps=6,
            warmup_steps=0,
            update_interval=4,
            **options,
        )

    spoiler = Spoiler(tensors)
    with floats("float64"):
        model = network(kind, optimizer)
        fit(kind, model, even(kind, 10), None, spoiler)
    trainers = [s for s in model.optimizer.method.states if s.subspace]
    return {
        "copies": copies(kind, model.variables),
        "moves": spoiler.moves(),
        "forgotten": [int(s.forgotten.numpy()) for s in trainers],
        "estimations": [int(s.estimations.numpy()) for s in trainers],
    }


class Flip(keras.callbacks.Callback):
    """Changes the last bit of a weight on one worker before a step."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == BAD and local_ranks("multi") == [1]:
            kernel = replica_copy(self.model.get_layer("hidden").kernel.value)
            kernel.assign(np.nextafter(kernel.numpy(), np.inf))


def flip(kind: str | None, optimizer: str, every: int) -> tuple[str, str]:
    """How training ends where one worker's weights are not the others'."""
    previous, comparison.INTERVAL = comparison.INTERVAL, every
    try:
        model = network(kind, OPTIMIZERS[optimizer])
        path = model.get_layer("hidden").kernel.path
        fit(kind, model, even(kind), None, Flip())
    except RuntimeError as error:
        return path, str(error)
    finally:
        comparison.INTERVAL = previous
    return path, ""


# ------------------------------------------------------------------ bad batches
def skip(kind: str | None, optimizer: str) -> dict[str, Any]:
    """A step with a NaN on one worker, the run without it, and an error."""
    steps = even(kind, 4)
    x, _ = images()
    x[steps[1][-1]] = np.nan  # the last worker's second rows

    def run(steps: Steps, most: int | None = None) -> Any:
        model = network(
            kind, OPTIMIZERS[optimizer], "batch_norm", metrics=["accuracy"]
        )
        model.optimizer.max_skipped_steps = most
        history = fit(kind, model, steps, x)
        return history, copies(kind, model.variables)[0]

    with floats("float64"):
        found = {
            "bad": run(steps),
            "without": run([steps[0], *steps[2:]]),
            "error": "",
        }
        try:
            run([steps[0], *[steps[1]] * 3], most=2)
        except FloatingPointError as error:
            found["error"] = str(error)
    return found


def end(kind: str | None) -> str:
    """How MR-DHO2 ends where all batches are bad."""
    model = network(kind, OPTIMIZERS["accelerator"])
    model.optimizer.max_skipped_steps = 3
    try:
        fit(kind, model, even(kind, 4), np.full_like(images()[0], np.nan))
    except FloatingPointError as error:
        return str(error)
    return ""


def half(kind: str | None, optimizer: str) -> dict[str, Any]:
    """Steps in float16, in one of which a worker's gradients overflow."""
    steps = even(kind, 6)
    x, _ = images()
    x[steps[2][0]] = 1e30
    scales: list[float] = []

    class Scales(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            scales.append(float(self.model.optimizer.dynamic_scale.numpy()))

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network(
            kind,
            lambda: tfkfac.LossScaleOptimizer(OPTIMIZERS[optimizer](), 8.0, 3),
        )
        history = fit(kind, model, steps, x.astype("float32"), Scales())
    finally:
        keras.config.set_dtype_policy(before)
    scaler = model.optimizer
    scale = [scaler.dynamic_scale, scaler.step_counter]
    return {
        "scales": scales,
        "losses": history["loss"],
        "copies": copies(kind, [*model.variables, *scale]),
        "iterations": int(scaler.iterations.numpy()),
    }


def lose_batches(kind: str | None, optimizer: str) -> dict[str, Any]:
    """Losses where a batch has a NaN on one worker, and where all have."""
    steps = even(kind, 3)
    x, _ = images()
    x[steps[1][-1]] = np.nan  # the last worker that trains
    if optimizer == "accelerator":
        x[steps[1][0]] = np.nan
    batches: list[float] = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            batches.append(logs["loss"])

    def run(steps: Steps, x: Array, *callbacks: Any) -> Any:
        model = network(kind, OPTIMIZERS[optimizer], metrics=["accuracy"])
        model.optimizer.max_skipped_steps = 3
        history = fit(kind, model, steps, x, *callbacks)
        return [history[name][0] for name in ("loss", "accuracy")]

    result = {
        "epoch": run(steps, x, Losses()),
        "batches": batches,
        "without": run([steps[0], steps[2]], x),
        "lost": run(steps[:2], np.full_like(x, np.nan)),
        "error": "",
    }
    try:
        run(steps, np.full_like(x, np.nan))
    except FloatingPointError as error:
        result["error"] = str(error)
    return result
