"""What a training was like: its metric against steps and seconds."""

import time
from collections.abc import Callable
from typing import Any

import keras


class Recorder(keras.callbacks.Callback):
    """Measures the metric every so many steps, and at the last one.

    The clocks stand still while it does. They start after the first step,
    which also traces the graph: that one is kept apart.

    Args:
        measure: Returns the metric.
        steps: Number of steps of the training.
        evaluations: Number of times to measure.
        batch: Examples of a batch.

    Attributes:
        first_step: Seconds and processor seconds of the first step.
        curve: For each evaluation the steps, samples, seconds and processor
            seconds so far, and the metric.
    """

    def __init__(
        self,
        measure: Callable[[], float],
        steps: int,
        evaluations: int,
        batch: int,
    ) -> None:
        super().__init__()
        self.first_step: dict[str, float] = {}
        self.curve: list[dict[str, float]] = []
        self._measure = measure
        self._batch = batch
        self._due = {
            -(-number * steps // evaluations)
            for number in range(1, evaluations + 1)
        }
        self._elapsed = (0.0, 0.0)
        self._started = (0.0, 0.0)

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clocks."""
        self._started = _now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measures if that is due."""
        step = batch + 1
        if step > 1 and step not in self._due:
            return
        self._stop()
        if step == 1:
            seconds, processor = self._elapsed
            self.first_step = {"seconds": seconds, "cpu_seconds": processor}
            self._elapsed = (0.0, 0.0)
        if step in self._due:
            seconds, processor = self._elapsed
            self.curve.append(
                {
                    "step": step,
                    "samples": step * self._batch,
                    "seconds": seconds,
                    "cpu_seconds": processor,
                    "metric": self._measure(),
                }
            )
        self._started = _now()

    def _stop(self) -> None:
        """Adds what has passed since the clocks were started."""
        now = _now()
        self._elapsed = (
            self._elapsed[0] + now[0] - self._started[0],
            self._elapsed[1] + now[1] - self._started[1],
        )


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
