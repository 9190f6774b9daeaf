"""Trains in a process of its own and times the steps it is asked for.

Questions come as lines of JSON on the standard input, answers go to the
standard output; what else is written there goes to the standard error.

- (the first answer, after the first step): "first_step" and other facts, or
  "unavailable", a reason
- {"intervals": [f, i]}: sets K-FAC's intervals; no answer
- {"steps": n}: trains n steps; their wall-clock and processor seconds
- {"facts": true}: peak memory and what the optimizer says of its own cost
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from benchmarks.task import Task, UnavailableError


class Training(Protocol):
    """A training that stops after each step."""

    def run(self, end_of_step: Callable[[], bool]) -> None:
        """Trains until `end_of_step`, called after each step, says no."""

    def set_intervals(self, factor: int, inverse: int) -> None:
        """Sets those of K-FAC."""

    def facts(self) -> dict[str, Any]:
        """What the optimizer says of its own cost."""


class Turns:
    """Times steps, and waits where no more have been asked for."""

    def __init__(
        self, training: Training, questions: TextIO, answers: TextIO
    ) -> None:
        self._training = training
        self._questions = questions
        self._answers = answers
        self._times: list[tuple[float, float]] = []
        self._wanted = 1
        self._is_first = True
        self._last = _now()

    def end_of_step(self) -> bool:
        """Notes the time of a step; returns whether another is asked for."""
        now = _now()
        self._times.append((now[0] - self._last[0], now[1] - self._last[1]))
        if len(self._times) < self._wanted:
            self._last = now
            return True
        if self._is_first:
            self._is_first = False
            [(seconds, processor)] = self._times
            first = {"seconds": seconds, "cpu_seconds": processor}
            self._answer({"first_step": first})
        else:
            self._answer(self._times)
        self._times = []
        self._wanted = self._next_turn()
        self._last = _now()
        return self._wanted > 0

    def _next_turn(self) -> int:
        """Answers questions up to one for steps; 0 at the end."""
        for line in self._questions:
            question = json.loads(line)
            if "steps" in question:
                return int(question["steps"])
            if "intervals" in question:
                self._training.set_intervals(*question["intervals"])
            else:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                self._answer(
                    {"peak_bytes": peak * 1024, **self._training.facts()}
                )
        return 0

    def _answer(self, answer: Any) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def make(task: Task) -> Training:
    """Builds model and optimizer.

    Raises:
        UnavailableError: If something for it is not installed.
    """
    if task.optimizer.startswith("bare-"):
        from benchmarks.bare_training import BareTraining

        return BareTraining(task)
    from benchmarks.keras_training import KerasTraining

    return KerasTraining(task)


def main() -> None:
    """Trains as the command line says."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        training = make(Task(**json.loads(sys.argv[1])))
    except UnavailableError as error:
        print(json.dumps({"unavailable": str(error)}), file=answers, flush=True)
        return
    training.run(Turns(training, sys.stdin, answers).end_of_step)


if __name__ == "__main__":
    main()
