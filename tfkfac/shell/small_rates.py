"""Warn about learning rates that were chosen for Adam."""

import contextlib
import contextvars
import math
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

RATE = 0.1  # default peak of natural-gradient steps
_restoring = contextvars.ContextVar("restoring", default=False)
# Minimum peak rate without a warning: 0.03 times the default peak, by `step`.
_LEAST = {"natural": 0.003, "spectral": 0.03}
_ROUNDING = 1 - 1e-6
# Updates at which a schedule is evaluated; each is 1.4 times the previous.
_SAMPLES = [0, *(int(2 ** (i / 2)) for i in range(41))]
_MEANING = {
    "natural": "Rates of natural-gradient steps are about 100 times Adam's",
    "spectral": "The rate multiplies a length that follows from the loss",
}
_FACTOR = {"natural": f", and multiply them by {RATE}", "spectral": ""}


class RateCheck:
    """Warn once if the learning rate is too small from the beginning.

    A small rate that a callback sets may begin a warm-up. So the warning comes
    when the rate does not rise in a later epoch, or at the end of `fit`. A
    rate of 0 causes no warning.
    """

    def __init__(self, name: str, step: str) -> None:
        self._name, self._step = name, step
        self._is_done = False
        # Largest rate so far, and its epoch, while all rates are too small.
        self._largest: float | None = None
        self._epoch: int | None = None

    def set(self, rate: Any, epoch: int | None, num_updates: int) -> None:
        """Check a rate that is set, in an epoch of `fit` or outside (None)."""
        is_first = self._largest is None
        # Weights that were trained with a larger rate may get a small one.
        self._is_done |= is_first and num_updates > 0
        least = _LEAST[self._step] * _ROUNDING
        largest = largest_rate(rate, least)
        if largest is None or largest >= least:
            self._largest = None
        elif self._largest is None or largest > self._largest:
            self._largest, self._epoch = largest, epoch
            if is_first and epoch is None:
                self.finish()
        elif epoch is None or epoch != self._epoch:
            self.finish()

    def finish(self) -> None:
        """Warn if all rates so far were too small."""
        if self._largest and not self._is_done:
            self._is_done = True
            if not _restoring.get():
                warnings.warn(
                    f"The learning rate of '{self._name}' is "
                    f"{self._largest:.3g} or less. {_MEANING[self._step]}. "
                    "Write `tfkfac.KFAC()`, which needs no rate. If a callback "
                    "sets the rate, remove the callback, or divide its rates "
                    f"by the largest{_FACTOR[self._step]}.",
                    stacklevel=5,
                )


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Context of loading, without warnings: a saved rate may have fallen."""
    token = _restoring.set(True)
    try:
        yield
    finally:
        _restoring.reset(token)


def largest_rate(rate: Any, least: float) -> float | None:
    """Return the rate, or the largest one of a schedule in 10^6 updates.

    For a schedule, stop at the first rate of at least `least`. Return None if
    the rate is a function or cannot be evaluated outside of a step.
    """
    largest = -math.inf
    try:
        if not isinstance(rate, LearningRateSchedule):
            if callable(rate):
                return None
            return float(tf.convert_to_tensor(rate))
        for update in _SAMPLES:
            largest = max(float(rate(tf.constant(update, tf.int64))), largest)
            if largest >= least:
                break
    except Exception:  # raised by user code, or for a tensor of a graph
        return None
    return largest
