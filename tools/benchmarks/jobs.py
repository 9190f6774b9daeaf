"""The processes of a variant."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from benchmarks.task import Task, UnavailableError
from benchmarks.variants import Variant
from launch import environments

TOOLS = pathlib.Path(__file__).parents[1]
GRACE = 20.0  # seconds for a process to end by itself


@dataclasses.dataclass(frozen=True)
class Setting:
    """How all processes of a run are started.

    Attributes:
        batch: Rows of a batch, of all workers together.
        mode: See `Task`.
        threads: Those of a process.
        workers: Number of processes that train a variant of Keras together.
    """

    batch: int = 128
    mode: str = "function"
    threads: int = 2
    workers: int = 1


class DiedError(Exception):
    """A process has ended before its time."""


class Job:
    """One process, or the workers of a cluster; it has made a first step.

    Attributes:
        first_step: Seconds and processor seconds of the first step, from the
            making of the optimizer's state on, with tracing; the model is
            there already.
        steps: Number of steps so far.

    Raises:
        UnavailableError: If the variant does not exist here.
        DiedError: If it fails.
    """

    def __init__(self, model: str, variant: Variant, setting: Setting) -> None:
        task = Task(
            model, variant.name, variant.arguments, setting.batch, setting.mode
        )
        self._variant = variant
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, close() does
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.worker",
                    json.dumps(task.__dict__),
                ],
                cwd=TOOLS,  # it is first on the module path
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            for environment in _environments(variant, setting)
        ]
        try:
            answer = self._answer()
            if "unavailable" in answer:
                raise UnavailableError(answer["unavailable"])
        except (DiedError, UnavailableError):
            self.close()
            raise
        self.first_step: dict[str, float] = answer["first_step"]
        self.steps = 1

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Trains; returns wall-clock and processor seconds of each step."""
        self._ask(steps=steps)
        self.steps += steps
        return self._answer()

    def set_intervals(self, factor: int, inverse: int) -> None:
        """Sets those of K-FAC."""
        self._ask(intervals=[factor, inverse])

    def facts(self) -> dict[str, Any]:
        """Returns peak memory, and what the optimizer says of its cost."""
        self._ask(facts=True)
        return self._answer()

    def _ask(self, **question: Any) -> None:
        try:
            for process in self._processes:
                assert process.stdin is not None
                print(json.dumps(question), file=process.stdin, flush=True)
        except BrokenPipeError:
            self._fail()

    def _answer(self) -> Any:
        """That of the first worker, when all have answered."""
        first, *_ = [self._read(process) for process in self._processes]
        return first

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        # The others of a cluster would wait for ever for one that has died.
        while not select.select([process.stdout], [], [], 1.0)[0]:
            if any(p.poll() is not None for p in self._processes):
                break
        else:
            if line := process.stdout.readline():
                return json.loads(line)
        self._fail()

    def _fail(self) -> NoReturn:
        self._log.seek(0)
        last_words = self._log.read().decode(errors="replace")[-2000:]
        raise DiedError(f"{self._variant.text} died:\n{last_words}")

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()


def common_environment(
    threads: int, *folders: pathlib.Path | None
) -> dict[str, str]:
    """What every process finds in its environment.

    Args:
        threads: Threads of an operation.
        folders: What goes first on the module path.
    """
    path = [*folders, TOOLS.parent, os.environ.get("PYTHONPATH", "")]
    return {
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "2",
    }


def _environments(
    variant: Variant, setting: Setting
) -> Iterator[Mapping[str, str]]:
    """Yields the environment of each process."""
    common = common_environment(setting.threads, variant.folder)
    if setting.workers == 1:
        yield {**os.environ, **common}
        return
    for environment in environments(setting.workers):
        yield {**environment, **common}
