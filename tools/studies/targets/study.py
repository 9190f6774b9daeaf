"""Train the runs that have no record, each setting in a process."""

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

# A run, the number of its environment, and the result of `training.train`.
Record = dict[str, Any]
TRAININGS = ROOT / "docs" / "trainings.json"
EQUAL_SECONDS = ROOT / "docs" / "equal_seconds.json"
# Data sets that need no directory of files.
EMBEDDED = ("text", "tokens", "arm", "digits", "drawn")
MODULES = ("tensorflow", "keras", "keras_hub")


class FailedError(Exception):
    """A training has failed."""


class Records:
    """The records of a file, which may not exist yet.

    `command` has the arguments of the command line that adds records.

    Attributes:
        environments: Machines, versions and commands.
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
        """Return the runs that have no record."""
        known = {Run(**record["run"]) for record in self.runs}
        return [run for run in dict.fromkeys(runs) if run not in known]

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        """Add a record; replace the file atomically."""
        assert self._command is not None
        here = environment(self._command)
        if here not in self.environments:
            self.environments.append(here)
        number = self.environments.index(here)
        self.runs.append({"run": run.__dict__, "environment": number, **result})
        parts = [
            f'"{name}": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]"
            for name, lines in (
                ("environments", self.environments),
                ("runs", self.runs),
            )
        ]
        new = self._path.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        new.replace(self._path)


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Return machine, versions and command, without names of folders."""
    file = pathlib.Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text)
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
    """Return the last commit of the library; "+" if files differ."""
    commit = _git("log", "-1", "--format=%h", "--", "tfkfac")
    differs = "+" * bool(_git("status", "--porcelain", "--", "tfkfac"))
    return f"{commit}{differs}"


def _git(*words: str) -> str:
    command = ("git", "-C", str(ROOT), *words)
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def _without_path(word: str) -> str:
    """Return a word of a command line, a path without its folders."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{pathlib.PurePath(path).name}"


def train_all(
    runs: Sequence[Run],
    directories: Mapping[str, pathlib.Path],
    files: Mapping[str, str],
    jobs: int,
    add: Callable[[Run, Mapping[str, Any]], None],
) -> list[str]:
    """Train; return a message for each failure.

    Runs that differ in their seeds only share a process.

    Args:
        runs: The runs.
        directories: Directories of idx files, by data set.
        files: Files that define optimizers, by method.
        jobs: Number of processes at a time.
        add: Called with the run and the result of each training.
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
                add(run, result)
        except FailedError as error:
            return f"{first}:\n{error}"
        return None

    with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
        ended = executor.map(train_one, settings.values())
        return [failure for failure in ended if failure]


def train(
    runs: Sequence[Run], directory: pathlib.Path | None, file: str | None
) -> Iterator[Mapping[str, Any]]:
    """Train in a new process; yield the result of each run."""
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
    """Return the name, or "digits" for images without a directory."""
    return name if name in (*directories, *EMBEDDED) else "digits"
