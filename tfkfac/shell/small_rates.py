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
# Rates below 0.03 times the default peaks, in float32, cause a warning.
_LEAST = {"natural": 0.003, "spectral": 0.03}
_ROUNDING = 1 - 1e-6
# Updates at which a schedule is evaluated: each 1.4 times the one before.
_SAMPLES = [0, *(int(2 ** (i / 2)) for i in range(41))]
_MEANING = {
    "natural": "Rates of natural-gradient steps are about 100 times Adam's",
    "spectral": "The rate multiplies a length that follows from the loss",
}
_FACTOR = {"natural": f", and multiply them by {RATE}", "spectral": ""}


def warn_of_small_rate(name: str, step: str, rate: Any) -> None:
    """Warn if a rate, or all rates of a schedule in 10^6 updates, are small.

    A rate of 0 causes no warning.
    """
    least = _LEAST[step] * _ROUNDING
    largest = -math.inf
    try:
        if isinstance(rate, LearningRateSchedule):
            for update in _SAMPLES:
                value = float(rate(tf.constant(update, tf.int64)))
                largest = max(largest, value)
                if largest >= least:
                    return
        elif not callable(rate):
            largest = float(tf.convert_to_tensor(rate))
    except Exception:  # raised by user code, or for a tensor of a graph
        return
    if 0 < largest < least and not _restoring.get():
        warnings.warn(
            f"The learning rate of '{name}' is {largest:.3g} or less. "
            f"{_MEANING[step]}. Write `tfkfac.KFAC()`, which needs no rate, or "
            f"divide the rates by the largest{_FACTOR[step]}.",
            stacklevel=3,
        )


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Context without warnings: a saved rate may have fallen in training."""
    token = _restoring.set(True)
    try:
        yield
    finally:
        _restoring.reset(token)
