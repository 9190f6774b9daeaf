"""Trainings of the examples, each in processes of its own."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

EXAMPLES = pathlib.Path(__file__).parents[1]
LAUNCH = EXAMPLES.parent / "tools" / "launch.py"
# Unless the environment says otherwise: so trainings can run side by side.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class FailedError(Exception):
    """A training has ended in an error; the message has its last words."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A script of the examples, with one optimizer.

    Attributes:
        script: Its name.
        optimizer: As `--optimizer` takes it.
        arguments: Further arguments.
        workers: Number of processes that train together.
    """

    script: str
    optimizer: str
    arguments: Sequence[str] = ()
    workers: int = 1

    @classmethod
    def of_classifier(
        cls, optimizer: str, setting: str, workers: int = 1
    ) -> Self:
        """Of the classifier, with its other arguments as one text."""
        return cls("classification", optimizer, setting.split(), workers)

    def command(self, record: pathlib.Path) -> list[str]:
        """What runs it, and leaves its measurements in a file."""
        script = str(EXAMPLES / f"{self.script}.py")
        command = [sys.executable, script, "--optimizer", self.optimizer]
        command += [*self.arguments, "--json", str(record)]
        if self.workers == 1:
            return command
        return [sys.executable, str(LAUNCH), str(self.workers), "--", *command]

    def run(self) -> "Result":
        """Trains.

        Raises:
            FailedError: If it fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "run"
            process = subprocess.run(
                self.command(record),
                env={**ONE_THREAD, **os.environ},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            if process.returncode:
                raise FailedError(process.stderr[-1500:].strip())
            files = sorted(pathlib.Path(folder).iterdir())
            return Result([_only(json.loads(f.read_text())) for f in files])


def _only(runs: Mapping[str, Any]) -> Any:
    [run] = runs.values()
    return run


@dataclasses.dataclass(frozen=True)
class Result:
    """What the workers of a training have measured; the first is the chief."""

    workers: Sequence[Mapping[str, Any]]

    @property
    def metric(self) -> float:
        """The test metric after the last epoch."""
        return self.workers[0]["evaluations"][-1]["metric"]

    @property
    def seconds(self) -> float:
        """Seconds of all steps, those of other processes included."""
        return self.workers[0]["seconds"][-1]

    @property
    def processor_seconds(self) -> float:
        """Processor seconds of all steps, of the first worker."""
        return self.workers[0]["cpu_seconds"][-1]

    @property
    def steps_to_target(self) -> float | None:
        """Steps to the target of the example, None if it was not reached."""
        return self.workers[0]["steps_to_target"]

    @property
    def processor_seconds_to_target(self) -> float | None:
        """Processor seconds of these steps, of the first worker."""
        steps = self.steps_to_target
        return steps and self.workers[0]["cpu_seconds"][int(steps) - 1]

    @property
    def updates(self) -> Sequence[int]:
        """Updates of the factors by K-FAC, and steps with decompositions."""
        return self.workers[0]["updates"]

    def seconds_of(self, kind: str) -> float | None:
        """Median seconds of a kind of step, None if there was none."""
        return self.workers[0]["seconds_by_kind"].get(kind)

    def state(self, part: str = "total") -> float:
        """Megabytes of curvature state of the worker that has most."""
        return max(w["state_bytes"].get(part, 0) for w in self.workers) / 1e6

    def received(self, kind: str) -> float:
        """Megabytes that a worker receives at most in a kind of step."""
        return (
            max(
                sum(w["communication_bytes"][kind].values())
                for w in self.workers
            )
            / 1e6
        )


def run_all(
    tasks: Sequence[Training],
    jobs: int,
    note: Callable[[int], None],
) -> list[Any]:
    """Runs tasks, some at a time.

    Args:
        tasks: The tasks.
        jobs: How many at a time.
        note: Called with the number of each that has ended.

    Raises:
        FailedError: If one fails; those not begun are left.
    """
    with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
        begun = {executor.submit(t.run): n for n, t in enumerate(tasks)}
        try:
            for done in concurrent.futures.as_completed(begun):
                done.result()
                note(begun[done])
        except FailedError:
            executor.shutdown(cancel_futures=True)
            raise
        return [done.result() for done in begun]
