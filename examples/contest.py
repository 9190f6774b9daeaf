"""Compare the errors of Keras optimizers and SciPy's solvers over time."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]
LBFGS, LEAST_SQUARES = "lbfgs", "least_squares"  # solvers of SciPy
MAX_STEPS = 10**7  # not reached: the time limit ends the training


@dataclasses.dataclass
class Race:
    """The errors of an optimizer over time.

    Attributes:
        seconds: Processor seconds of all threads, with tracing, without the
            measurement of errors.
        errors: Error at each of the `seconds`.
        steps: Number of steps at each of the `seconds`.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: list[float] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)

    def at(self, seconds: float) -> float:
        """Return the last error that was measured within `seconds`."""
        count = sum(t <= seconds for t in self.seconds)
        return self.errors[max(count - 1, 0)]


class Clock(keras.callbacks.Callback):
    """Measure the error at growing intervals; end the training after a time.

    Attributes:
        is_over: True after `seconds` processor seconds.
    """

    def __init__(self, error: Callable[[], float], seconds: float) -> None:
        super().__init__()
        self.error, self.limit, self.is_over = error, seconds, False
        self.race, self.steps = Race(), 0
        self.error()  # traces its graph before the start
        self.start = time.process_time()

    def tick(self) -> None:
        """Count a step; record the error if the interval is over."""
        self.steps += 1
        now = time.process_time() - self.start
        race, self.is_over = self.race, now > self.limit
        if self.is_over or not race.seconds or now > 1.1 * race.seconds[-1]:
            race.seconds.append(now)
            race.errors.append(self.error())
            race.steps.append(self.steps)
            self.start = time.process_time() - now

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tick()
        if self.is_over:
            self.model.stop_training = True


def train(
    model: keras.Model,
    optimizer: Any,
    data: tuple[Any, Any],
    clock: Clock,
    loss: Any = "mse",
    loss_weights: Any = None,
) -> Race:
    """Train on one batch, `(x, y)`, by a Keras optimizer or `LBFGS`."""
    is_scipy = isinstance(optimizer, str) and optimizer == LBFGS
    chosen = "sgd" if is_scipy else optimizer
    model.compile(chosen, loss, loss_weights=loss_weights)
    if is_scipy:
        lbfgs(model, data, clock)
    else:
        batches = tf.data.Dataset.from_tensors(data).cache().repeat(MAX_STEPS)
        model.fit(
            batches, steps_per_epoch=MAX_STEPS, verbose=0, callbacks=[clock]
        )
    return clock.race


class Flat:
    """Variables as one vector of float64."""

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self.values = [v.value for v in variables]
        ends = np.cumsum([int(np.prod(v.shape)) for v in self.values])
        self.size, self._splits = int(ends[-1]), ends[:-1]

    def get(self) -> Array:
        """Return the vector."""
        return np.concatenate([np.ravel(v) for v in self.values]).astype(float)

    def set(self, vector: Array) -> None:
        """Assign the vector."""
        parts = np.split(vector, self._splits)
        for value, part in zip(self.values, parts, strict=True):
            value.assign(part.reshape(value.shape))


class _Ended(Exception):
    """Raised to stop SciPy when the time is over."""


def lbfgs(model: keras.Model, data: tuple[Any, Any], clock: Clock) -> None:
    """Minimise the compiled loss by SciPy's L-BFGS-B, in float64."""
    from scipy import optimize

    x, y = keras.tree.map_structure(tf.constant, data)
    model(x)
    flat = Flat(model.trainable_variables)

    @tf.function
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return loss, tape.gradient(loss, flat.values)

    def objective(vector: Array) -> tuple[float, Array]:
        flat.set(vector)
        loss, parts = gradients()
        rows = [np.ravel(part).astype(float) for part in parts]
        return float(loss), np.concatenate(rows)

    def tick(intermediate_result: Any) -> None:
        clock.tick()
        if clock.is_over:
            raise StopIteration

    # L-BFGS-B may also end before the time: if it finds no lower loss.
    options = {"maxiter": MAX_STEPS, "maxfun": MAX_STEPS, "maxcor": 50}
    optimize.minimize(
        objective,
        flat.get(),
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
    """Minimise residuals by MINPACK, in float64.

    `roots` has the square root of the weight of each residual.
    """
    from scipy import optimize

    flat = Flat(variables)
    fixed = {name: tf.constant(values) for name, values in points.items()}

    def row(name: str, point: Any) -> Any:
        with tf.GradientTape() as tape:
            values = tf.reshape(residuals[name](point[None]), [-1])
        parts = tape.jacobian(values, flat.values, unconnected_gradients="zero")
        rows = [tf.reshape(part, [tf.size(values), -1]) for part in parts]
        return roots[name] * tf.concat(rows, 1)

    @tf.function
    def vector() -> Any:
        parts = [roots[n] * residuals[n](x) for n, x in fixed.items()]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    @tf.function
    def jacobian() -> Any:
        parts = [
            tf.vectorized_map(functools.partial(row, name), x)
            for name, x in fixed.items()
        ]
        return tf.concat([tf.reshape(p, [-1, flat.size]) for p in parts], 0)

    def at(values: Array) -> Array:
        flat.set(values)
        return np.array(vector())

    def slopes(values: Array) -> Array:  # called after each step
        flat.set(values)
        clock.tick()
        if clock.is_over:
            raise _Ended
        return np.array(jacobian())

    with contextlib.suppress(_Ended):
        optimize.least_squares(
            at, flat.get(), slopes, method="lm", x_scale="jac",
            ftol=1e-15, xtol=1e-15, gtol=1e-15, max_nfev=MAX_STEPS,
        )  # fmt: skip
