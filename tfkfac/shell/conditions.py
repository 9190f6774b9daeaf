"""Keras model of the residuals of named conditions, for `minimize`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import paused
from tfkfac.checks import check_range
from tfkfac.compat.graphs import state_variable

# Number of steps passed to `fit` if only time limits the run.
MAX_STEPS = 10**9


class Points:
    """The points of each condition: arrays, or functions of the step.

    The points are in variables that no model tracks or saves.
    """

    def __init__(
        self, sources: Mapping[str, Any], dtype: Any, step: int
    ) -> None:
        self.sources, self.dtype, self.step = dict(sources), dtype, step
        self.variables = {}
        for name, source in self.sources.items():
            value = source(step) if callable(source) else source
            self.variables[name] = state_variable(value, dtype, name)

    def resample(self, step: int) -> None:
        """Call the functions for a step; no-op for the current step."""
        for name, source in self.sources.items():
            if callable(source) and step != self.step:
                self.variables[name].assign(tf.cast(source(step), self.dtype))
        self.step = step


class Conditions(keras.Model):
    """Model that returns the residuals of each condition at its points.

    The loss is the weighted sum of the mean squared residuals.
    """

    residuals: Mapping[str, Callable[[tf.Tensor], tf.Tensor]]
    points: Points

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        widest = max(variables, key=lambda v: tf.as_dtype(v.dtype).size)
        super().__init__(name="conditions", dtype=widest.dtype)
        for v in variables:
            if v.dtype != widest.dtype:
                warnings.warn(
                    f"Variable '{v.path}' is {v.dtype}, but '{widest.path}' "
                    f"is {widest.dtype}: the lower precision limits the "
                    f'result. Create it with dtype="{widest.dtype}".',
                    stacklevel=3,
                )
        self.unknowns = list(variables)  # tracked by Keras
        self.built = True

    def call(self, points: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Compute the residuals at points, by name; each `(batch, k)`."""
        residuals = {}
        for name, x in points.items():
            # Differentiate at an identity: second derivatives by `tf.gradients`
            # at captured tensors are wrong.
            r = tf.convert_to_tensor(self.residuals[name](tf.identity(x)))
            if r.shape.rank not in (1, 2):
                raise ValueError(
                    f"Residuals '{name}' must have the shape `(batch,)` or "
                    f"`(batch, k)`. Received: shape {r.shape}"
                )
            residuals[name] = r[:, None] if r.shape.rank == 1 else r
        return residuals

    def dummy_data(self) -> tf.data.Dataset:
        """Return dummy data for `fit`: a zero point for each replica."""
        replicas = self.distribute_strategy.num_replicas_in_sync
        points = {
            name: tf.zeros([replicas, *v.shape[1:]], v.dtype)
            for name, v in self.points.variables.items()
        }
        zeros = {name: tf.zeros([replicas, 1]) for name in points}
        # Create the metrics of the losses now: later, they cause a retrace.
        with paused():
            self.compute_loss(points, zeros, zeros)
        return tf.data.Dataset.from_tensors((points, zeros)).repeat()

    def train_step(self, data: Any) -> Any:
        """Train on the points for one step; ignore the data of `fit`."""
        replica = tf.distribute.get_replica_context()
        # Each replica takes every `num_replicas`-th row.
        index = replica.replica_id_in_sync_group
        points = {
            name: v.value()[index :: replica.num_replicas_in_sync]
            for name, v in self.points.variables.items()
        }
        zeros = {n: tf.zeros([tf.shape(x)[0], 1]) for n, x in points.items()}
        return super().train_step((points, zeros))


def check_conditions(
    residuals: Any, variables: Any, points: Any, weights: Any
) -> None:
    """Check the arguments of `minimize`."""
    is_valid = isinstance(residuals, Mapping) and len(residuals) > 0
    if not is_valid or not all(map(callable, residuals.values())):
        raise ValueError(
            "Argument `residuals` must be a dictionary of functions. "
            f"Received: residuals={residuals}"
        )
    for name, value in (("points", points), ("weights", weights)):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"Argument `{name}` must be a dictionary with the names of "
                f"`residuals`. Received: {name}={value!r}"
            )
    if set(points) != set(residuals) or not set(weights) <= set(residuals):
        raise ValueError(
            "Arguments `points` and `weights` must have the names of "
            f"`residuals`, {list(residuals)}. Received: points of "
            f"{list(points)}, weights of {list(weights)}"
        )
    for weight in weights.values():
        check_range("weights", weight, 0)
    is_valid = isinstance(variables, Sequence) and len(variables) > 0
    if not is_valid or not all(
        isinstance(v, keras.Variable) for v in variables
    ):
        raise ValueError(
            "Argument `variables` must be a list of `keras.Variable`, of built "
            f"layers or others. Received: variables={variables}"
        )
