"""Residuals of named conditions as a Keras model, and the points of each."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import paused
from tfkfac.checks import check_range
from tfkfac.compat.graphs import state_variable

# Steps of a run whose end is a time.
MOST_STEPS = 10**9


class Points:
    """The points of conditions: arrays, or functions of the step.

    Each has a variable, the same in all steps; no model tracks or saves it.
    """

    def __init__(self, given: Mapping[str, Any], dtype: Any, step: int) -> None:
        self.given, self.dtype, self.step = dict(given), dtype, step
        self.variables = {}
        for name, own in self.given.items():
            value = own(step) if callable(own) else own
            self.variables[name] = state_variable(value, dtype, name)

    def draw(self, step: int) -> None:
        """Calls the functions for a step, unless they have been for it."""
        for name, own in self.given.items():
            if callable(own) and step != self.step:
                self.variables[name].assign(tf.cast(own(step), self.dtype))
        self.step = step

    def of_replica(self) -> dict[str, tf.Tensor]:
        """The part of each that falls to this replica."""
        replica = tf.distribute.get_replica_context()
        first = replica.replica_id_in_sync_group
        by = replica.num_replicas_in_sync
        return {n: v.value()[first::by] for n, v in self.variables.items()}


class Conditions(keras.Model):
    """Residuals of named conditions, each at points of its own.

    Its loss is the sum of the weighted means of their squares.
    """

    residuals: Mapping[str, Callable[[tf.Tensor], tf.Tensor]]
    points: Points

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        exact = max(variables, key=lambda v: tf.as_dtype(v.dtype).size)
        super().__init__(name="conditions", dtype=exact.dtype)
        for v in variables:
            if v.dtype != exact.dtype:
                warnings.warn(
                    f"Variable '{v.path}' is {v.dtype}, whose rounding ends "
                    f"the steps, though '{exact.path}' is {exact.dtype}. Make "
                    f'it with dtype="{exact.dtype}".',
                    stacklevel=3,
                )
        self.unknowns = list(variables)  # which makes them trainable
        self.built = True

    def call(self, points: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The residuals at points, `(batch, k)` each, by name."""
        found = {}
        for name, own in points.items():
            # Of this graph: `tf.gradients` twice is wrong for what is captured.
            r = tf.convert_to_tensor(self.residuals[name](tf.identity(own)))
            if r.shape.rank not in (1, 2):
                raise ValueError(
                    f"Residuals '{name}' must have the shape `(batch,)` or "
                    f"`(batch, k)`. Received: shape {r.shape}"
                )
            found[name] = r[:, None] if r.shape.rank == 1 else r
        return found

    def stand_ins(self) -> tf.data.Dataset:
        """Data for `fit`, which wants some: a point for each replica."""
        replicas = self.distribute_strategy.num_replicas_in_sync
        points = {
            name: tf.zeros([replicas, *v.shape[1:]], v.dtype)
            for name, v in self.points.variables.items()
        }
        zeros = {name: tf.zeros([replicas, 1]) for name in points}
        with paused():  # makes the losses' metrics: no second trace for these
            self.compute_loss(points, zeros, zeros)
        return tf.data.Dataset.from_tensors((points, zeros)).repeat()

    def train_step(self, data: Any) -> Any:
        """A step at the points, in the place of the data of `fit`."""
        points = self.points.of_replica()
        zeros = {n: tf.zeros([tf.shape(x)[0], 1]) for n, x in points.items()}
        return super().train_step((points, zeros))


class Course(keras.callbacks.Callback):
    """Draws the points of each epoch, and ends after steps or seconds."""

    def __init__(self, steps: int, seconds: float | None, every: int) -> None:
        super().__init__()
        self.steps, self.every = steps, every
        self.end = time.monotonic() + (seconds or math.inf)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Draws."""
        self.before = epoch * self.every
        self.model.points.draw(int(self.model.optimizer.iterations.numpy()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends."""
        is_last = self.before + batch + 1 >= self.steps
        if is_last or time.monotonic() > self.end:
            self.model.stop_training = True


def check_conditions(
    residuals: Any, variables: Any, points: Any, weights: Any
) -> None:
    """Checks the conditions of `minimize`.

    Raises:
        ValueError: If something is wrong with them.
    """
    if not residuals or not all(map(callable, residuals.values())):
        raise ValueError(
            "Argument `residuals` must have functions by name. Received: "
            f"residuals={residuals}"
        )
    same = set(points) == set(residuals)
    if not same or not set(weights) <= set(residuals):
        raise ValueError(
            "Arguments `points` and `weights` must have the names of "
            f"`residuals`, {list(residuals)}. Received: points of "
            f"{list(points)}, weights of {list(weights)}"
        )
    for weight in weights.values():
        check_range("weights", weight, 0)
    if not variables or not all(
        isinstance(v, keras.Variable) for v in variables
    ):
        raise ValueError(
            "Argument `variables` must be a list of `keras.Variable`, of built "
            f"layers or your own. Received: variables={variables}"
        )
