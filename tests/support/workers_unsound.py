"""Jobs of several workers in which numbers go wrong, and what is left."""

from collections.abc import Callable
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
from tfkfac.compat.graphs import own_copy
from tfkfac.supervision import comparison

STEPS, BAD = 8, 5


class Spoiler(keras.callbacks.Callback):
    """Fills tensors of a block with NaN before a step, where there are any.

    Args:
        what: "decomposition" or "factor".
        path: The layer that it happens to.
    """

    def __init__(self, what: str, path: str) -> None:
        super().__init__()
        self._what, self._path = what, path
        self.weights: list[list[Array]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.weights.append(self.model.get_weights())
        if batch != BAD:
            return
        for state in self.model.optimizer.method.states:
            for one in state.preconditioners:
                if one.block.path.endswith(self._path):
                    for tensor in self._tensors(one):
                        nan = np.full_like(tensor.numpy(), float("nan"))
                        tensor.assign(nan)

    def _tensors(self, one: Any) -> list[Any]:
        if self._what == "factor":
            return one.factors.averages if one.factors else []
        return one.decomposition.tensors if one.decomposition else []


def spoil(
    kind: str | None,
    what: str,
    model: str = "small",
    path: str = "hidden",
    **options: Any,
) -> dict[str, Any]:
    """Trains for a few steps, before one of which something breaks."""
    workers = strategy(kind).num_replicas_in_sync
    with floats("float64"):
        network = compiled(kind, model, "sgd", options)
        steps = shares(FEEDS["even"](), workers)[:STEPS]
        spoiler = Spoiler(what, path)
        network.fit(
            dataset(kind, *images(), steps, None),
            steps_per_epoch=STEPS,
            shuffle=False,
            verbose=0,
            callbacks=[spoiler],
        )
    optimizer = network.optimizer
    states = optimizer.method.states
    return {
        "weights": network.get_weights(),
        "moves": [
            max(float(np.abs(b - a).max()) for a, b in zip(*pair, strict=True))
            for pair in zip(spoiler.weights, spoiler.weights[1:], strict=False)
        ],
        "copies": copies(kind, [*network.variables, *optimizer.variables]),
        "counts": [
            {
                name: getattr(s.counters, name).numpy().tolist()
                for name in ("plain", "dropped", "failures")
            }
            for s in states
        ],
        "paths": states[0].counters.paths,
        "events": optimizer.events(),
        "iterations": int(optimizer.iterations.numpy()),
    }


class Flip(keras.callbacks.Callback):
    """Changes the last bit of a weight on one worker before a step."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == BAD and local_ranks("multi") == [1]:
            kernel = own_copy(self.model.get_layer("hidden").kernel.value)
            kernel.assign(np.nextafter(kernel.numpy(), np.inf))


def flip(kind: str | None, optimizer: str, every: int) -> tuple[str, str]:
    """How training ends where one worker's weights are not the others'."""
    workers = strategy(kind).num_replicas_in_sync
    steps = shares(FEEDS["even"](), workers)[:STEPS]
    usual, comparison.EVERY = comparison.EVERY, every
    try:
        with strategy(kind).scope():
            model = MODELS["small"]()
            model.compile(
                OPTIMIZERS[optimizer](),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        path = model.get_layer("hidden").kernel.path
        model.fit(
            dataset(kind, *images(), steps, None),
            steps_per_epoch=STEPS,
            verbose=0,
            callbacks=[Flip()],
        )
    except RuntimeError as error:
        return path, str(error)
    finally:
        comparison.EVERY = usual
    return path, ""


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "kfac": lambda: tfkfac.KFAC(INNERS["sgd"](), **DEFAULTS),
    "fosi": lambda: tfkfac.FOSI(INNERS["adam"](), warmup_steps=1),
}


def skip(kind: str | None, optimizer: str) -> dict[str, Any]:
    """A step with a NaN on one worker, the run without it, and an error."""
    workers = strategy(kind).num_replicas_in_sync
    steps = shares(FEEDS["even"](), workers)[:4]

    x, y = images()
    x[steps[1][-1]] = np.nan  # the last worker's second rows

    def run(steps: Any, most: int | None = None) -> Any:
        with strategy(kind).scope():
            keras.utils.set_random_seed(0)
            model = MODELS["batch_norm"]()
            own = OPTIMIZERS[optimizer]()
            own.max_skipped_steps = most
            entropy = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True
            )
            model.compile(own, entropy, metrics=["accuracy"])
        history = model.fit(
            dataset(kind, x, y, steps, None),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
        ).history
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
    workers = strategy(kind).num_replicas_in_sync
    steps = shares(FEEDS["even"](), workers)[:4]
    x, y = images()
    with strategy(kind).scope():
        model = MODELS["small"]()
        model.compile(
            tfkfac.FOSI(accelerator_fraction=0.5, max_skipped_steps=3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    try:
        model.fit(
            dataset(kind, np.full_like(x, np.nan), y, steps, None),
            steps_per_epoch=len(steps),
            verbose=0,
        )
    except FloatingPointError as error:
        return str(error)
    return ""


HALF: dict[str, Callable[[], Any]] = {
    **OPTIMIZERS,
    "dp_kfac": lambda: tfkfac.KFAC(
        INNERS["sgd"](), distribution="dp_kfac", **DEFAULTS
    ),
    "accelerator": lambda: tfkfac.FOSI(
        INNERS["adam"](), warmup_steps=1, accelerator_fraction=0.5
    ),
}


def half(kind: str | None, optimizer: str) -> dict[str, Any]:
    """Steps in float16, in one of which a worker's gradients overflow."""
    workers = strategy(kind).num_replicas_in_sync
    steps = shares(FEEDS["even"](), workers)[:6]
    x, y = images()
    x[steps[2][0]] = 1e30
    scales: list[float] = []

    class Scales(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            scales.append(float(scaler.dynamic_scale.numpy()))

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy(kind).scope():
            keras.utils.set_random_seed(0)
            model = MODELS["small"]()
            scaler = tfkfac.LossScaleOptimizer(HALF[optimizer](), 8.0, 3)
            model.compile(
                scaler,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        history = model.fit(
            dataset(kind, x.astype("float32"), y, steps, None),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
            callbacks=[Scales()],
        ).history
    finally:
        keras.config.set_dtype_policy(before)
    return {
        "scales": scales,
        "losses": history["loss"],
        "copies": copies(
            kind,
            [*model.variables, scaler.dynamic_scale, scaler.step_counter],
        ),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


class Loss(keras.callbacks.Callback):
    """Breaks what one worker has of the directions before a step.

    Args:
        kind: As for `strategies.strategy`.
        tensor: Which of it.
    """

    def __init__(self, kind: str, tensor: str) -> None:
        super().__init__()
        self._kind, self._tensor = kind, tensor
        self.weights: list[list[Array]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.weights.append(self.model.get_weights())
        states = self.model.optimizer.method.states
        for rank, state in zip(local_ranks(self._kind), states, strict=True):
            if batch == BAD and rank == 1:
                tensor = getattr(state.subspace, self._tensor)
                tensor.assign(np.full(tensor.shape, np.nan))


def lose(kind: str, inner: str, tensor: str, **options: Any) -> dict[str, Any]:
    """Steps with directions, before one of which those of a worker break."""
    workers = strategy(kind).num_replicas_in_sync
    steps = shares(FEEDS["even"](), workers)
    with floats("float64"):
        with strategy(kind).scope():
            keras.utils.set_random_seed(0)
            model = MODELS["small"]()
            model.compile(
                tfkfac.FOSI(
                    INNERS[inner](),
                    num_largest=3,
                    lanczos_steps=6,
                    warmup_steps=0,
                    update_interval=4,
                    **options,
                ),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        breaker = Loss(kind, tensor)
        model.fit(
            dataset(kind, *images(), steps, None),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
            callbacks=[breaker],
        )
    trainers = [s for s in model.optimizer.method.states if s.subspace]
    return {
        "copies": copies(kind, model.variables),
        "moves": [
            max(float(np.abs(b - a).max()) for a, b in zip(*pair, strict=True))
            for pair in zip(breaker.weights, breaker.weights[1:], strict=False)
        ],
        "forgotten": [int(s.forgotten.numpy()) for s in trainers],
        "estimations": [int(s.estimations.numpy()) for s in trainers],
    }
