"""Runs functions in real clusters of local processes.

Functions are named "package.module:function" and are called with the same
arguments in every process, whose `TF_CONFIG` makes it a worker. Starting
TensorFlow costs seconds, hence `run_cases`.
"""

import dataclasses
import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tests.support.worker_process import JOB_FILE, headline, result_file

ROOT = pathlib.Path(__file__).parents[2]
LOG_TAIL = 4000  # characters of each worker's log in a failure message
GRACE = 10.0  # seconds that peers of a failed worker get to fail as well
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclasses.dataclass(frozen=True)
class Case:
    """A function to call on every worker, and its arguments."""

    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class ClusterError(AssertionError):
    """A worker failed, died or ran out of time; the message has the logs."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one case, by worker."""

    values: list[Any]
    errors: list[str | None]
    """Tracebacks of the workers that raised."""
    complaint: str | None
    """None if every worker returned, else everything there is to say."""

    def get(self) -> list[Any]:
        """The values by worker.

        Raises:
            ClusterError: If not every worker returned.
        """
        if self.complaint is not None:
            raise ClusterError(self.complaint)
        return self.values


def run(target: str, *args: Any, workers: int = 2, **options: Any) -> list[Any]:
    """Calls one function on every worker of a new cluster.

    Args:
        target: "package.module:function".
        *args: Its arguments.
        workers: Number of processes.
        **options: Those of `run_cases`.

    Returns:
        The values it returned, by worker.

    Raises:
        ClusterError: If not every worker returned.
    """
    cases = {target: Case(target, args)}
    return run_cases(cases, workers=workers, **options)[target].get()


def run_cases(
    cases: Mapping[str, Case],
    workers: int = 2,
    devices: int = 1,
    time_limit: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Calls functions one after the other on every worker of a new cluster.

    A case that raises does not keep the next from running, as long as all
    workers come out of it.

    Args:
        cases: What to call, by name.
        workers: Number of processes; a single one gets no `TF_CONFIG`.
        devices: Logical CPUs of each process.
        time_limit: Seconds for everything, start included.
        environment: Variables to set in every process.

    Returns:
        The outcome of each case.
    """
    with tempfile.TemporaryDirectory(prefix="cluster-") as directory:
        path = pathlib.Path(directory)
        with _Cluster(path, cases, workers, devices, environment) as cluster:
            reason = cluster.wait(time_limit)
        return cluster.outcomes(reason)


class _Cluster:
    def __init__(
        self,
        directory: pathlib.Path,
        cases: Mapping[str, Case],
        workers: int,
        devices: int,
        environment: Mapping[str, str] | None,
    ) -> None:
        self._directory = directory
        self._cases = dict(cases)
        self._workers = range(workers)
        calls = [(n, c.target, c.args, c.kwargs) for n, c in cases.items()]
        job = {"cases": calls, "workers": workers, "devices": devices}
        (directory / JOB_FILE).write_bytes(pickle.dumps(job))
        addresses = local_addresses(workers)
        self._processes = [
            self._start(index, addresses, environment or {})
            for index in self._workers
        ]

    def _start(
        self,
        index: int,
        addresses: Sequence[str],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        with self._log(index).open("wb") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.worker_process",
                    str(self._directory),
                    str(index),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**worker_environment(index, addresses), **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _log(self, index: int) -> pathlib.Path:
        return self._directory / f"worker{index}.log"

    def _result(self, case: int, worker: int) -> tuple[Any, str | None] | None:
        path = result_file(self._directory, case, worker)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def wait(self, time_limit: float) -> str | None:
        """Waits for the end; returns why not all cases ended, if so."""
        start = time.monotonic()
        uneven_since: float | None = None
        while True:
            now = time.monotonic()
            done = [self._count_results(index) for index in self._workers]
            if min(done) == len(self._cases):
                self._dismiss()
                return None
            uneven = self._failed_ahead(done)
            uneven_since = (uneven_since or now) if uneven else None
            reason = self._exited()
            if uneven_since is not None and now > uneven_since + GRACE:
                reason = f"{uneven} and the others did not finish the case"
            elif now > start + time_limit:
                reason = f"not finished after {time_limit:g} s"
            if reason is not None:
                self._dump_stacks()
                return reason
            time.sleep(0.02)

    def _count_results(self, worker: int) -> int:
        count = 0
        while result_file(self._directory, count, worker).exists():
            count += 1
        return count

    def _failed_ahead(self, done: Sequence[int]) -> str | None:
        """The first worker that raised in a case its peers are still in."""
        for worker, count in enumerate(done):
            if count > min(done):
                result = self._result(count - 1, worker)
                if result is not None and result[1] is not None:
                    return f"worker {worker} failed"
        return None

    def _exited(self) -> str | None:
        for worker, process in enumerate(self._processes):
            if process.poll() is not None:
                return f"worker {worker} exited with {process.returncode}"
        return None

    def _dismiss(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                return  # __exit__ kills it

    def _dump_stacks(self) -> None:
        """Has the workers that live write Python stacks to their logs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def outcomes(self, reason: str | None) -> dict[str, Outcome]:
        """Collects the results; `reason` is what `wait` returned."""
        return {
            name: self._outcome(number, name, reason)
            for number, name in enumerate(self._cases)
        }

    def _outcome(self, number: int, name: str, reason: str | None) -> Outcome:
        results = [self._result(number, worker) for worker in self._workers]
        ended = [result or (None, None) for result in results]
        errors = [error for _, error in ended]
        complaint = None
        if None in results or any(errors):
            why = reason if None in results else "a worker raised"
            logs = [self._log_tail(worker, name) for worker in self._workers]
            complaint = "\n".join([f"case {name!r}: {why}", *logs])
        return Outcome([value for value, _ in ended], errors, complaint)

    def _log_tail(self, worker: int, case: str) -> str:
        """The last of what the worker wrote before the next case."""
        log = self._log(worker).read_text(errors="replace")
        names = list(self._cases)
        for following in names[names.index(case) + 1 :]:
            log = log.partition(headline(following))[0]
        return f"--- worker {worker}\n{log[-LOG_TAIL:]}"


def local_addresses(count: int) -> list[str]:
    """Distinct free addresses: all are open while they are chosen."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


def worker_environment(index: int, addresses: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: CPU only, one thread, no proxy."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in PROXIES and name != "TF_CONFIG"
    }
    if len(addresses) > 1:
        environment["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": list(addresses)},
                "task": {"type": "worker", "index": index},
            }
        )
    return environment | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "GRPC_VERBOSITY": "ERROR",
        "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTEROP_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "1",
        "no_proxy": "*",
    }
