"""The metric of a training against steps and seconds."""

import math
import time
from collections.abc import Callable
from typing import Any

import keras


class Recorder(keras.callbacks.Callback):
    """Measure the metric at regular steps, and at the last step.

    The clocks stop during a measurement. They start after the first step, which
    traces the graph and is recorded separately.

    Attributes:
        first_step: Processor seconds of the first step.
        curve: For each measurement the number of steps, the seconds and
            processor seconds so far, and the metric, None if it is not finite.
    """

    def __init__(
        self, measure: Callable[[], float], steps: int, evaluations: int
    ) -> None:
        super().__init__()
        self.first_step: float | None = None
        self.curve: dict[str, list[Any]] = {
            name: [] for name in ("step", "seconds", "cpu_seconds", "metric")
        }
        self._measure = measure
        self._due = {
            -(-number * steps // evaluations)
            for number in range(1, evaluations + 1)
        }
        self._elapsed = (0.0, 0.0)
        self._started = (0.0, 0.0)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the clocks."""
        self._started = _now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measure if a measurement is due."""
        step = batch + 1
        if step > 1 and step not in self._due:
            return
        self._stop(step)
        if step in self._due:
            self._evaluate(step)
        self._started = _now()

    def _stop(self, step: int) -> None:
        """Stop the clocks."""
        now = _now()
        self._elapsed = (
            self._elapsed[0] + now[0] - self._started[0],
            self._elapsed[1] + now[1] - self._started[1],
        )
        if step == 1:
            self.first_step = _short(self._elapsed[1])
            self._elapsed = (0.0, 0.0)

    def _evaluate(self, step: int) -> None:
        """Add a point to the curve."""
        values = (step, *map(_short, (*self._elapsed, self._measure())))
        for column, value in zip(self.curve.values(), values, strict=True):
            column.append(value)


class Allowance(Recorder):
    """End a training after some processor seconds, without the first step.

    The learning rate falls linearly from `rate` to 0 over this time.
    """

    def __init__(
        self,
        measure: Callable[[], float],
        seconds: float,
        evaluations: int,
        rate: float,
    ) -> None:
        super().__init__(measure, 0, evaluations)
        self._seconds, self._evaluations = seconds, evaluations
        self._rate = rate

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measure if a measurement is due; set the learning rate."""
        self._stop(batch + 1)
        spent = min(self._elapsed[1] / self._seconds, 1.0)
        if spent >= (len(self.curve["step"]) + 1) / self._evaluations:
            self._evaluate(batch + 1)
        self.model.optimizer.learning_rate = self._rate * (1 - spent)
        self.model.stop_training = spent == 1
        self._started = _now()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _short(value: float) -> float | None:
    """Round to six digits; None if not finite, which JSON cannot store."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
