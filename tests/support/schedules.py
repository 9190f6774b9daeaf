"""Schedules as values of arguments."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule


class Formula(LearningRateSchedule):
    """Schedule of a function of the step, which may use Python's `if`."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

        @tf.function
        def traced(step: tf.Tensor) -> tf.Tensor:
            value = function(step)
            if tf.is_tensor(value):
                return value
            return tf.constant(value, tf.float64)  # all digits of a float

        self._traced = traced

    def __call__(self, step: Any) -> Any:
        return self._traced(step)

    def get_config(self) -> dict[str, Any]:
        return {"function": self._function.__qualname__}
