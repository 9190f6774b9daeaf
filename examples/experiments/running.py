"""Run the scripts of the examples in new processes, for the experiments."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

EXAMPLES = pathlib.Path(__file__).parents[1]
LAUNCH = EXAMPLES.parent / "tools" / "launch.py"
# Default environment: few threads, because trainings run side by side.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
Case = Mapping[str, Any]
Record = Mapping[str, Any]  # measurements of a worker, see `session.Run`


class Training(NamedTuple):
    """A script of the examples with one optimizer.

    Attributes:
        optimizer: Value of `--optimizer`.
        arguments: Further arguments, separated by blanks.
        workers: Number of processes that train together.
        script: Name of the script.
    """

    optimizer: str
    arguments: str
    workers: int = 1
    script: str = "classification"

    def run(self) -> list[Record]:
        """Train; return the measurements of each worker."""
        with tempfile.TemporaryDirectory() as folder:
            script = str(EXAMPLES / f"{self.script}.py")
            command = [sys.executable, script, "--optimizer", self.optimizer]
            command += [*self.arguments.split(), "--json", f"{folder}/run"]
            if self.workers > 1:
                launch = [sys.executable, str(LAUNCH), str(self.workers), "--"]
                command = [*launch, *command]
            done = subprocess.run(
                command,
                env=ENVIRONMENT | os.environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                sys.exit(f"a training has failed:\n{done.stderr[-1500:]}")
            files = sorted(pathlib.Path(folder).iterdir())
            runs = [json.loads(file.read_text()) for file in files]
        return [record for run in runs for record in run.values()]


class Experiment(NamedTuple):
    """A table or figure of a paper.

    Attributes:
        source: The paper, and its table or figure.
        question: The question that it answers.
        quick: Values of each parameter with `--quick`; all are combined.
        full: Values that differ without `--quick`.
        training: Function of a case and of `--quick`.
        measures: Names of `MEASURES`.
        elsewhere: Parts of the paper that need other machines.
    """

    source: str
    question: str
    quick: Mapping[str, Sequence[Any]]
    full: Mapping[str, Sequence[Any]]
    training: Callable[[Case, bool], Training]
    measures: Sequence[str]
    elsewhere: str

    def cases(self, quick: bool) -> list[Case]:
        """Return all combinations of the parameters."""
        values = self.quick if quick else {**self.quick, **self.full}
        return [
            dict(zip(values, combination, strict=True))
            for combination in itertools.product(*values.values())
        ]


def optimizer(name: str, **arguments: Any) -> str:
    """Format an optimizer and its arguments as a value of `--optimizer`."""
    pairs = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in arguments.items()
    )
    return ":".join([name, *pairs])


def _state(name: str) -> Callable[[Sequence[Record]], float]:
    """Return a measure: the largest state `name` of a worker, in MB."""
    return lambda workers: max(
        worker["state_bytes"].get(name, 0) / 1e6 for worker in workers
    )


def _received(step: str) -> Callable[[Sequence[Record]], float]:
    """Return a measure: the most MB that a worker receives in a step."""
    return lambda workers: max(
        sum(worker["communication_bytes"][step].values()) / 1e6
        for worker in workers
    )


def _cpu_to_target(workers: Sequence[Record]) -> float | None:
    steps = workers[0]["steps_to_target"]
    return steps and workers[0]["cpu_seconds"][steps - 1]


# Functions of the records of all workers; the first worker is the chief.
MEASURES: Mapping[str, Callable[[Sequence[Record]], float | None]] = {
    "metric": lambda workers: workers[0]["evaluations"][-1]["metric"],
    "seconds": lambda workers: workers[0]["seconds"][-1],
    "CPU seconds": lambda workers: workers[0]["cpu_seconds"][-1],
    "steps to target": lambda workers: workers[0]["steps_to_target"],
    "CPU s to target": _cpu_to_target,
    "state, MB": _state("total"),
    "factors, MB": _state("factors"),
    "decompositions, MB": _state("decompositions"),
    "directions, MB": _state("directions"),
    "plain step, MB": _received("plain"),
    "factor step, MB": _received("factor"),
    "inverse step, MB": _received("inverse"),
}
