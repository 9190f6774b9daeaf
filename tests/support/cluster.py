"""Runs functions in real clusters of local processes.

Functions are named "package.module:function" and are called with the same
arguments in every process, whose `TF_CONFIG` makes it a worker. Starting
TensorFlow costs seconds, hence a cluster stays for one case after the other:
`Pool` keeps one and replaces it when it is broken.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tests.support.ports import address, claim_ports
from tests.support.worker_process import case_file, result_file, write

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


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the processes of a cluster are."""

    workers: int = 2
    """Number of processes; a single one gets no `TF_CONFIG`."""
    devices: int = 1
    """Logical CPUs of each process."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables to set in every process."""


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
        """The values by worker, or an error if not every worker returned."""
        if self.complaint is not None:
            raise ClusterError(self.complaint)
        return self.values


def run(
    target: str, *args: Any, time_limit: float = 120.0, **shape: Any
) -> list[Any]:
    """Calls one function on every worker of a new cluster of a `Shape`."""
    with Cluster(Shape(**shape)) as cluster:
        return cluster.run(target, Case(target, args), time_limit).get()


class Pool:
    """One cluster at a time, kept for as long as it fits and works."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def run(
        self, name: str, case: Case, shape: Shape, time_limit: float = 120.0
    ) -> Outcome:
        """Calls a function on every worker of a cluster.

        A cluster of another shape takes the place of the last one. The name is
        for the message of a failure; the time limit includes the start.
        """
        if self._cluster is None or self._cluster.shape != shape:
            self.close()
            self._cluster = Cluster(shape)
        outcome = self._cluster.run(name, case, time_limit)
        if outcome.complaint is not None:
            # Its next collectives could meet those of this case.
            self.close()
        return outcome

    def close(self) -> None:
        """Ends the processes; the next case starts others."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Cluster:
    """Processes that run one case after the other until they are closed."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._cases = 0
        self._workers = range(shape.workers)
        self._processes: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as opened:
            folder = tempfile.TemporaryDirectory(prefix="cluster-")
            self._directory = pathlib.Path(opened.enter_context(folder))
            ports = claim_ports(shape.workers)
            addresses = [address(opened.enter_context(port)) for port in ports]
            opened.callback(self._end)
            for index in self._workers:
                self._processes.append(self._start(index, addresses))
            self._opened = opened.pop_all()

    def _start(
        self, index: int, addresses: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.worker_process"]
        own = [self._directory, index, self.shape.devices]
        environment = worker_environment(index, addresses)
        with self._log(index).open("wb") as log:
            return subprocess.Popen(
                [*command, *map(str, own)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **self.shape.environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes and gives back their ports."""
        self._opened.close()

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        patience = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(patience - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, name: str, case: Case, time_limit: float = 120.0) -> Outcome:
        """Calls a function on every worker; see `Pool.run`."""
        number, self._cases = self._cases, self._cases + 1
        begin = [self._log(worker).stat().st_size for worker in self._workers]
        call = (case.target, case.args, case.kwargs)
        write(case_file(self._directory, number), pickle.dumps(call))
        reason = self._wait(number, time_limit)
        return self._outcome(number, name, reason, begin)

    def _log(self, index: int) -> pathlib.Path:
        return self._directory / f"worker{index}.log"

    def _result(self, case: int, worker: int) -> tuple[Any, str | None] | None:
        path = result_file(self._directory, case, worker)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def _wait(self, case: int, time_limit: float) -> str | None:
        """Waits for the end of a case; returns why it did not come, if so."""
        end = time.monotonic() + time_limit
        patience: float | None = None  # with the peers of one that has failed
        reason = None
        while reason is None:
            now = time.monotonic()
            results = [self._result(case, worker) for worker in self._workers]
            if None not in results:
                return None
            failed = [w for w, r in enumerate(results) if r and r[1]]
            if failed:
                patience = patience or now + GRACE
            codes = {w: p.poll() for w, p in enumerate(self._processes)}
            gone = [w for w, code in codes.items() if code is not None]
            if patience is not None and now > patience:
                reason = f"worker {failed[0]} failed and the others did not"
            elif gone:
                reason = f"worker {gone[0]} exited with {codes[gone[0]]}"
            elif now > end:
                reason = f"not finished after {time_limit:g} s"
            time.sleep(0.02)
        for process in self._processes:  # those that live write their stacks
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return reason

    def _outcome(
        self,
        number: int,
        name: str,
        reason: str | None,
        begin: Sequence[int],
    ) -> Outcome:
        results = [self._result(number, worker) for worker in self._workers]
        ended = [result or (None, None) for result in results]
        errors = [error for _, error in ended]
        complaint = None
        if None in results or any(errors):
            why = reason if None in results else "a worker raised"
            logs = map(self._log_tail, self._workers, begin)
            complaint = "\n".join([f"case {name!r}: {why}", *logs])
        return Outcome([value for value, _ in ended], errors, complaint)

    def _log_tail(self, worker: int, begin: int) -> str:
        """The last of what the worker wrote since some byte of its log."""
        log = self._log(worker).read_bytes()[begin:].decode(errors="replace")
        return f"--- worker {worker}\n{log[-LOG_TAIL:]}"


def worker_environment(index: int, addresses: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: CPU only, one thread, no proxy."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in PROXIES and name != "TF_CONFIG"
    }
    if len(addresses) > 1:
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": list(addresses)}, "task": task}
        environment["TF_CONFIG"] = json.dumps(config)
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
