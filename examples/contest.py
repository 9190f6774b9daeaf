"""Optimizers against the processor's clock: Keras' `fit` and SciPy."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]
# Inputs, labels and sample weights; the first two may be nests.
Batch = tuple[Any, Any, Array | None]
LBFGS, LEAST_SQUARES = "lbfgs", "least_squares"  # SciPy's
MOST_STEPS = 10**7


@dataclasses.dataclass
class Race:
    """What an optimizer reached.

    Attributes:
        seconds: Processor seconds, of all threads, tracing included,
            measuring not.
        errors: The errors then.
        steps: The steps done then.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: list[float] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)

    def at(self, seconds: float) -> float:
        """The last error within some seconds."""
        inside = [t <= seconds for t in self.seconds]
        return self.errors[max(sum(inside) - 1, 0)]


class Clock(keras.callbacks.Callback):
    """Measures the error at growing intervals, and ends the training."""

    def __init__(self, error: Callable[[], float], seconds: float) -> None:
        super().__init__()
        self.error, self.limit = error, seconds
        self.race, self.steps = Race(), 0
        self.error()  # traces it before the start
        self.start = time.process_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        now = time.process_time() - self.start
        race = self.race
        last = race.seconds[-1] if race.seconds else 0.0
        if now > 1.1 * last or now > self.limit:
            race.seconds.append(now)
            race.errors.append(self.error())
            race.steps.append(self.steps)
            self.start = time.process_time() - now
        if now > self.limit:
            self.model.stop_training = True


def mlp(
    features: int,
    *widths: int,
    penalty: float = 0.0,
    activation: Any = "tanh",
) -> Any:
    """A network of one output, with an L2 penalty."""
    l2 = keras.regularizers.L2(penalty) if penalty else None
    hidden = [
        keras.layers.Dense(width, activation, kernel_regularizer=l2)
        for width in widths
    ]
    last = keras.layers.Dense(1, kernel_regularizer=l2)
    return keras.Sequential([keras.Input((features,)), *hidden, last])


def relative_error(network: Any, x: Array, want: Array) -> Callable[[], float]:
    """The norm of a network's error at some points, over that of the values."""
    outputs, points = tf.function(network), tf.constant(x)

    def error() -> float:
        return float(np.linalg.norm(outputs(points) - want))

    return lambda: error() / float(np.linalg.norm(want))


def run(
    model: keras.Model,
    optimizer: Any,
    batch: Batch,
    error: Callable[[], float],
    seconds: float,
    loss: Any = "mse",
    loss_weights: Any = None,
) -> Race:
    """Trains a model on one batch for some seconds.

    Args:
        model: The model.
        optimizer: A Keras optimizer, or "lbfgs" for SciPy's L-BFGS-B.
        batch: The batch.
        error: What is to become small.
        seconds: The time.
        loss: The loss.
        loss_weights: Weights of several losses.
    """
    is_scipy = isinstance(optimizer, str) and optimizer == LBFGS
    chosen = "sgd" if is_scipy else optimizer
    model.compile(chosen, loss, loss_weights=loss_weights)
    clock = Clock(error, seconds)
    if is_scipy:
        lbfgs(model, batch, clock)
        return clock.race
    whole = tuple(part for part in batch if part is not None)
    data = tf.data.Dataset.from_tensors(whole).cache().repeat(MOST_STEPS)
    model.fit(data, steps_per_epoch=MOST_STEPS, verbose=0, callbacks=[clock])
    return clock.race


def lbfgs(model: keras.Model, batch: Batch, clock: Clock) -> None:
    """Minimises the compiled loss by SciPy, in float64."""
    from scipy import optimize

    x, y = keras.tree.map_structure(tf.constant, batch[:2])
    weight = None if batch[2] is None else tf.constant(batch[2])
    model(x)
    clock.set_model(model)
    values = [v.value for v in model.trainable_variables]
    ends = np.cumsum([int(np.prod(v.shape)) for v in values])

    @tf.function
    def slopes() -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), weight)
        return loss, tape.gradient(loss, values)

    def objective(flat: Array) -> tuple[float, Array]:
        for v, part in zip(values, np.split(flat, ends[:-1]), strict=True):
            v.assign(part.reshape(v.shape))
        loss, gradients = slopes()
        parts = [np.ravel(g).astype(float) for g in gradients]
        return float(loss), np.concatenate(parts)

    def tick(intermediate_result: Any) -> None:
        clock.on_train_batch_end(0)
        if model.stop_training:
            raise StopIteration

    model.stop_training = False
    start = np.concatenate([np.ravel(v) for v in values]).astype(float)
    # It also ends where it finds no lower loss.
    options = {"maxiter": MOST_STEPS, "maxfun": MOST_STEPS, "maxcor": 50}
    optimize.minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        callback=tick,
        options=options | {"ftol": 0.0, "gtol": 0.0},
    )


def least_squares(
    residuals: Mapping[str, Callable[[Any], Any]],
    points: Mapping[str, Any],
    roots: Mapping[str, float],
    variables: list[keras.Variable],
    clock: Clock,
) -> None:
    """Makes residuals small by MINPACK, in float64, with exact Jacobians.

    Residuals are functions of points, times their roots.
    """
    from scipy import optimize

    values = [v.value for v in variables]
    ends = np.cumsum([int(np.prod(v.shape)) for v in values])
    fixed = {name: tf.constant(own) for name, own in points.items()}

    def row(name: str, point: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.reshape(residuals[name](point[None]), [-1])
        parts = tape.jacobian(found, values, unconnected_gradients="zero")
        flat = [tf.reshape(part, [tf.size(found), -1]) for part in parts]
        return roots[name] * tf.concat(flat, 1)

    @tf.function
    def vector() -> Any:
        parts = [roots[n] * residuals[n](x) for n, x in fixed.items()]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    @tf.function
    def rows() -> Any:
        parts = [
            tf.vectorized_map(functools.partial(row, name), own)
            for name, own in fixed.items()
        ]
        size = int(ends[-1])
        return tf.concat([tf.reshape(part, [-1, size]) for part in parts], 0)

    class Ended(Exception):
        pass

    def assign(flat: Array) -> None:
        for v, part in zip(values, np.split(flat, ends[:-1]), strict=True):
            v.assign(part.reshape(v.shape))

    def at(flat: Array) -> Array:
        assign(flat)
        return np.array(vector())

    def slopes(flat: Array) -> Array:  # where a step has been taken
        assign(flat)
        clock.on_train_batch_end(0)
        if model.stop_training:
            raise Ended
        return np.array(rows())

    model = keras.Model()
    model.stop_training = False
    clock.set_model(model)
    start = np.concatenate([np.ravel(v) for v in values])
    with contextlib.suppress(Ended):
        optimize.least_squares(
            at, start, slopes, method="lm", x_scale="jac",
            ftol=1e-15, xtol=1e-15, gtol=1e-15, max_nfev=MOST_STEPS,
        )  # fmt: skip


def table(races: Mapping[str, Race], marks: list[float]) -> str:
    """The errors of each optimizer at some seconds."""
    head = f"{'error after':14}" + "".join(f"{m:>9g} s" for m in marks)
    lines = [
        f"{name:14}"
        + "".join(f"{race.at(m):11.1e}" for m in marks)
        + f"{race.steps[-1]:9,} steps{race.seconds[-1]:7.1f} CPU s"
        for name, race in races.items()
    ]
    return "\n".join([head, *lines])


def plot(races: Mapping[str, Race], path: str, title: str) -> None:
    """Draws the errors against the seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    for name, race in races.items():
        axes.loglog(race.seconds, race.errors, label=name)
    axes.set(xlabel="CPU seconds", ylabel="relative L2 error", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
