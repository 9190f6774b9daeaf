"""Learning rate that falls to 0 over the length of a `fit`."""

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.checks import check_range
from tfkfac.saving.slots import Slots


class RunPlan(Slots):
    """Start and length of a training run, for `FitDecay`.

    The plan of a `fit` that is loaded from a file takes effect only in a `fit`
    that continues it.
    """

    def __init__(self) -> None:
        super().__init__("run")
        # Number of updates before the run.
        self.start = self.slot("run_start")
        # Number of updates of the run; 0 while the number is unknown.
        self.length = self.slot("run_length")
        # Fraction of the peak at the start; below 1 after `move_end`.
        self.scale = self.slot("run_scale", (), "float32", 1.0)
        # Argument `epochs` of the `fit`; 0 for a run that the user began.
        self.epochs = self.slot("run_epochs")
        # Current epoch of the `fit`, from 0 on.
        self.epoch = self.slot("run_epoch")
        # Number of batches of an epoch; 0 if the number is unknown.
        self.steps = self.slot("run_steps")
        self.in_fit = self.slot("in_fit", saved=False)
        # Learning rate that the user has set in training, which ends the decay
        # of the inner optimizer; negative if no rate is set.
        self.set_rate = self.slot("set_learning_rate", (), "float32", -1.0)

    def begin(
        self, start: int, length: int, epochs: int = 0, steps: int = 0
    ) -> None:
        """Plan a run of `length` updates from the update `start` on."""
        self.start.assign(start)
        self.length.assign(length)
        self.scale.assign(1.0)
        self.epochs.assign(epochs)
        self.steps.assign(steps)

    def move_end(self, update: int, num_left: int, steps: int) -> None:
        """End the run in `num_left` updates; the rate at `update` stays."""
        fraction = self.remaining_fraction(tf.constant(update, tf.int64))
        self.begin(update, num_left, int(self.epochs.numpy()), steps)
        self.scale.assign(fraction)

    def end_fit(self) -> None:
        """Forget the plan, so that the rate is the peak outside of `fit`."""
        self.begin(0, 0)
        self.in_fit.assign(0)

    @property
    def end(self) -> int | None:
        """Number of updates at the end of the run; None if unknown."""
        length = int(self.length.numpy())
        return int(self.start.numpy()) + length if length else None

    def count_updates(self, update: tf.Tensor) -> tf.Tensor:
        """Return the length of the run; the updates so far if it is unknown."""
        num_done = tf.cast(update, tf.int64) - self.start + 1
        is_known = self._is_used() & (self.length > 0)
        # A moved run has done the fraction `1 - scale` before its start.
        length, scale = (
            tf.cast(x, tf.float64) for x in (self.length, self.scale)
        )
        whole = tf.round(tf.math.divide_no_nan(length, scale))
        return tf.where(is_known, tf.cast(whole, tf.int64), num_done)

    def _is_used(self) -> tf.Tensor:
        """True in a `fit`, or in a run that the user began."""
        return (self.in_fit > 0) | tf.equal(self.epochs, 0)

    def remaining_fraction(self, update: tf.Tensor) -> tf.Tensor:
        """`scale * clip(1 - (t - start) / length, 0, 1)`; 1 if unused."""
        num_done = tf.cast(update, tf.int64) - self.start
        num_done = tf.clip_by_value(num_done, 0, self.length)
        length = tf.cast(tf.maximum(self.length, 1), tf.float32)
        fraction = 1.0 - tf.cast(num_done, tf.float32) / length
        return tf.where(self._is_used(), self.scale * fraction, 1.0)


@keras.saving.register_keras_serializable(package="tfkfac")
class FitDecay(LearningRateSchedule):
    """Learning rate that falls linearly to 0 over each `fit`.

    `rate(t) = peak * clip(1 - (t - t0) / T, 0, 1)` at the update t. T is the
    number of updates of the `fit`, t0 the update at its beginning. They are
    part of the optimizer's state, so that an interrupted run that is resumed
    goes on with the same rates. Each `fit` starts at the peak.

    If Keras does not know the number of batches, the rate is constant in the
    first epoch and falls linearly over the others. If a custom `train_step`
    does not update once for each batch, T is corrected after the first epoch.
    Outside of `fit` the rate is constant, unless `optimizer.begin_run(steps)`
    sets the length.

    Use it in an optimizer of tfkfac, as the learning rate of the inner or the
    rest optimizer. In Keras' optimizers alone the rate is constant.

    >>> tfkfac.KFAC(rest_optimizer=keras.optimizers.AdamW(
    ...     tfkfac.schedules.FitDecay(0.003), weight_decay=0.01))

    Args:
        peak: Learning rate at the beginning, at least 0.

    Raises:
        ValueError: If `peak` is not a number of at least 0.
    """

    def __init__(self, peak: float) -> None:
        super().__init__()
        self.peak = check_range("peak", peak, 0)
        self._plan: RunPlan | None = None
        self._can_be_set = False

    def follow(self, plan: RunPlan, can_be_set: bool) -> None:
        """Use the plan of an optimizer, and `set_rate` if `can_be_set`."""
        self._plan, self._can_be_set = plan, can_be_set

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate at the update `step`, float32."""
        peak = tf.constant(self.peak, tf.float32)
        if self._plan is None:
            return peak
        rate = peak * self._plan.remaining_fraction(step)
        if not self._can_be_set:
            return rate
        return tf.where(self._plan.set_rate < 0, rate, self._plan.set_rate)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"peak": self.peak}
