"""Trains what is not among the results yet, each setting in a process."""

import concurrent.futures
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from command import ROOT, STUDIES, installed, process_environment
from targets.run import Run

# A run, the number of its environment, and what `training.train` has returned.
Record = dict[str, Any]
TRAININGS = ROOT / "docs" / "trainings.json"
# Data that need no directory.
EMBEDDED = ("text", "tokens", "arm", "digits", "drawn")
MODULES = ("tensorflow", "keras", "keras_hub")


class FailedError(Exception):
    """A training has ended in an error."""


class Records:
    """All results of a file, a line for each.

    Args:
        path: The file, which need not exist yet.
        command: Arguments of the command line that results are added by.

    Attributes:
        environments: What machines and versions there were, and the command.
        runs: The records.
    """

    def __init__(
        self, path: pathlib.Path, command: Sequence[str] | None = None
    ) -> None:
        self._path = path
        self._command = command
        self.environments: list[dict[str, Any]] = []
        self.runs: list[Record] = []
        if path.exists():
            stored = json.loads(path.read_text())
            self.environments = stored["environments"]
            self.runs = stored["runs"]

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that have no record yet."""
        known = {Run(**record["run"]) for record in self.runs}
        return [run for run in dict.fromkeys(runs) if run not in known]

    def forget(self, methods: Sequence[str]) -> None:
        """Drops the records of methods."""
        self.runs = [r for r in self.runs if r["run"]["method"] not in methods]

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        """Adds a record; the file is there as a whole at any time."""
        assert self._command is not None
        here = environment(self._command)
        if here not in self.environments:
            self.environments.append(here)
        number = self.environments.index(here)
        self.runs.append({"run": run.__dict__, "environment": number, **result})
        parts = [
            f'"{name}": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]"
            for name, lines in vars(self).items()
            if not name.startswith("_")
        ]
        new = self._path.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        new.replace(self._path)


def environment(command: Sequence[str]) -> dict[str, Any]:
    """What figures depend on, without names of machines and folders."""
    names = re.findall(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    return {
        "script": "tools/studies/time_to_target.py",
        "arguments": [_without_path(word) for word in command],
        "tfkfac": f"{installed('tfkfac')} {last_commit()}",
        "python": platform.python_version(),
        **{name.replace("_", "-"): installed(name) for name in MODULES},
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
    }


def last_commit() -> str:
    """The last commit of the library; "+" if files differ."""
    commit = _git("log", "-1", "--format=%h", "--", "tfkfac")
    differs = "+" * bool(_git("status", "--porcelain", "--", "tfkfac"))
    return f"{commit}{differs}"


def _read(path: str) -> str:
    return pathlib.Path(path).read_text() if os.path.exists(path) else ""


def _git(*words: str) -> str:
    command = ("git", "-C", str(ROOT), *words)
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def _without_path(word: str) -> str:
    """A word of a command line; of a path there is the last name."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{pathlib.PurePath(path).name}"


def train_all(
    runs: Sequence[Run],
    directories: Mapping[str, pathlib.Path],
    files: Mapping[str, str],
    jobs: int,
    note: Callable[[Run, Mapping[str, Any]], None],
) -> list[str]:
    """Trains; runs that differ in their seeds share a process.

    Args:
        runs: What to train.
        directories: Where the idx files of a data set are.
        files: Those of optimizers from outside, by their names.
        jobs: Number of processes at a time.
        note: Called after each training.

    Returns:
        What failed, and its last words.
    """
    settings: dict[Run, list[Run]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run)

    def train_one(group: Sequence[Run]) -> str | None:
        first = group[0]
        directory, file = directories.get(first.data), files.get(first.method)
        try:
            results = train(group, directory, file)
            for run, result in zip(group, results, strict=True):
                note(run, result)
        except FailedError as error:
            return f"{first}:\n{error}"
        return None

    with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
        ended = executor.map(train_one, settings.values())
        return [failure for failure in ended if failure]


def train(
    runs: Sequence[Run], directory: pathlib.Path | None, file: str | None
) -> Iterator[Mapping[str, Any]]:
    """Trains in a new process; yields what it says of each run.

    Raises:
        FailedError: If it fails.
    """
    task = {
        "runs": [run.__dict__ for run in runs],
        "directory": directory and str(directory),
        "file": file,
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "targets.training", json.dumps(task)],
            cwd=STUDIES,  # it is first on the module path
            env=process_environment(threads=1),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            yield from map(json.loads, process.stdout)
        if process.wait():
            log.seek(0)
            raise FailedError(log.read()[-2000:])


def data_name(name: str, directories: Mapping[str, pathlib.Path]) -> str:
    """What is trained on: "digits" stand in for images that are not given."""
    return name if name in (*directories, *EMBEDDED) else "digits"
