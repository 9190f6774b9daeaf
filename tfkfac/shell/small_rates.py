"""Warn about learning rates that were chosen for Adam."""

import warnings
from typing import Any

import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.schedules import FitDecay

RATE = 0.1  # default peak of natural-gradient steps
# Rates below these cause a warning: 0.03 times the default peaks.
_LEAST = {"natural": 0.003, "spectral": 0.03}
# Updates at which a schedule is evaluated: each 1.4 times the one before.
_SAMPLES = [0, *(int(2 ** (i / 2)) for i in range(41))]
_MEANING = {
    "natural": (
        "Rates of natural-gradient steps are about 100 times those of Adam. "
        "Write `tfkfac.KFAC()`, which needs no rate, or "
        f"`tfkfac.KFAC(learning_rate=tfkfac.schedules.FitDecay({RATE}))`. "
        "If a callback sets the rate, remove the callback, or divide its rates "
        f"by the largest and multiply them by {RATE}."
    ),
    "spectral": (
        "The rate of spectral steps is a factor of their length, which follows "
        "from the loss. Write `tfkfac.KFAC()`, whose rate falls from 1 to 0 "
        "over each `fit`. If a callback sets the rate, remove the callback, or "
        "divide its rates by the largest."
    ),
}


class RateCheck:
    """Warn once if the learning rate is too small from the beginning.

    A small rate that a callback sets may begin a warm-up. So the warning comes
    when the rate does not rise in a later epoch, or at the end of `fit`. A
    rate of 0 causes no warning.

    Args:
        name: Name of the optimizer.
        step: Type of step. None for an inner optimizer with rates of its own
            size, which are not checked.
    """

    def __init__(self, name: str, step: str | None) -> None:
        self._name = name
        self._step = step
        self._is_done = step is None
        # Largest rate so far, and its epoch, while all rates are too small.
        self._largest: float | None = None
        self._epoch: int | None = None

    def set(self, rate: Any, epoch: int | None, num_updates: int) -> None:
        """Check a rate or schedule.

        Args:
            rate: A number, variable or schedule.
            epoch: Epoch of the `fit`; None outside of `fit`.
            num_updates: Number of updates of the weights so far.
        """
        is_first = self._largest is None
        # Weights that were trained with a larger rate may get a small one.
        self._is_done |= is_first and num_updates > 0
        if self._is_done or self._step is None:
            return
        largest = largest_rate(rate)
        if largest is None or largest >= _LEAST[self._step]:
            self._largest = None
        elif self._largest is None or largest > self._largest:
            self._largest, self._epoch = largest, epoch
            if is_first and epoch is None:
                self.finish()
        elif epoch is None or epoch != self._epoch:
            self.finish()

    def finish(self) -> None:
        """Warn if all rates so far were too small."""
        if self._is_done or self._step is None or not self._largest:
            return
        self._is_done = True
        warnings.warn(
            f"The learning rate of '{self._name}' is {self._largest:.3g} or "
            f"less. {_MEANING[self._step]}",
            stacklevel=4,
        )


def largest_rate(rate: Any) -> float | None:
    """Return the rate, or the largest one of a schedule in 10^6 updates.

    None if the rate is a function or cannot be evaluated outside of a step.
    """
    if isinstance(rate, FitDecay):
        return rate.peak
    try:
        if isinstance(rate, LearningRateSchedule):
            samples = tf.constant(_SAMPLES, tf.int64)
            return max(float(rate(step)) for step in samples)
        return None if callable(rate) else float(tf.convert_to_tensor(rate))
    except Exception:  # raised by user code, or for a tensor of a graph
        return None
