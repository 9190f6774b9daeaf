"""Clusters of local processes that run functions of the tests.

Starting TensorFlow takes seconds. A `Pool` therefore keeps its cluster for the
next call, and replaces it if a call fails or needs another `Shape`.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from tests.support.ports import address, claim_ports
from tests.support.worker_process import call_file, result_file, write

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT_S = 180.0  # of a call, the start of the cluster included
LOG_TAIL = 4000  # characters of each worker's log in an error message
GRACE_S = 10.0  # for the other workers after one has failed
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Processes of a cluster.

    Attributes:
        workers: Number of processes; a single process gets no `TF_CONFIG`.
        devices: Logical CPUs of each process.
        environment: Variables to set in every process.
    """

    workers: int = 2
    devices: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


SHAPES = {
    "two": Shape(2),
    "four": Shape(4),
    "mirrored": Shape(1, devices=2),
}


def cluster_of(test: str) -> str:
    """Return the key of `SHAPES` in the parameters of a test, or ""."""
    found = re.search(rf"\[.*?\b({'|'.join(SHAPES)})\b", test)
    return found[1] if found else ""


class ClusterError(AssertionError):
    """A worker failed, died or ran out of time; the message has the logs."""


def target_of(function: str | Callable[..., Any]) -> str:
    """Return "module:name" of a function."""
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{function.__name__}"


def run(
    function: str | Callable[..., Any],
    *args: Any,
    time_limit: float = TIME_LIMIT_S,
    **shape: Any,
) -> list[Any]:
    """Call a function on every worker of a new cluster of a `Shape`."""
    with Cluster(Shape(**shape)) as cluster:
        return cluster.run(function, *args, time_limit=time_limit)


class Pool:
    """The cluster of the last call, replaced if broken or of another shape.

    Args:
        startup: Function that every worker of a new cluster calls first.
    """

    def __init__(self, startup: Callable[[], None] | None = None) -> None:
        self._startup = startup
        self._cluster: Cluster | None = None

    def run(
        self,
        shape: Shape,
        function: str | Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function on every worker; return the values by worker."""
        if self._cluster is None or self._cluster.shape != shape:
            self.close()
            self._cluster = Cluster(shape)
            if self._startup is not None:
                self._cluster.run(self._startup)
        try:
            return self._cluster.run(function, *args, **kwargs)
        except ClusterError:
            # Collectives of the next call could match those of this call.
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Cluster:
    """Processes that run one function after the other."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._calls = 0
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
        arguments = [self._directory, index, self.shape.devices]
        environment = worker_environment(index, addresses)
        with self._log(index).open("wb") as log:
            return subprocess.Popen(
                [*command, *map(str, arguments)],
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
        """End the processes and free their ports."""
        self._opened.close()

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(
        self,
        function: str | Callable[..., Any],
        *args: Any,
        time_limit: float = TIME_LIMIT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function on every worker; return the values by worker."""
        number, self._calls = self._calls, self._calls + 1
        begin = [self._log(worker).stat().st_size for worker in self._workers]
        call = target_of(function), args, kwargs
        write(call_file(self._directory, number), pickle.dumps(call))
        reason = self._wait(number, time_limit)
        if reason is None:
            results = [self._result(number, w) for w in self._workers]
            if not any(result[1] for result in results):
                return [result[0] for result in results]
            reason = "a worker raised"
        logs = map(self._log_tail, self._workers, begin)
        raise ClusterError("\n".join([f"{call[0]}{args}: {reason}", *logs]))

    def _log(self, index: int) -> pathlib.Path:
        return self._directory / f"worker{index}.log"

    def _result(self, call: int, worker: int) -> Any:
        """The pair of value and traceback, or None."""
        path = result_file(self._directory, call, worker)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def _wait(self, call: int, time_limit: float) -> str | None:
        """Wait for all workers; return why some did not end, if so."""
        end = time.monotonic() + time_limit
        deadline: float | None = None  # of the others after a failure
        reason = None
        while reason is None:
            now = time.monotonic()
            results = [self._result(call, worker) for worker in self._workers]
            if None not in results:
                return None
            failed = [w for w, r in enumerate(results) if r and r[1]]
            if failed:
                deadline = deadline or now + GRACE_S
            codes = {w: p.poll() for w, p in enumerate(self._processes)}
            ended = [w for w, code in codes.items() if code is not None]
            if deadline is not None and now > deadline:
                reason = f"worker {failed[0]} failed and the others did not"
            elif ended:
                reason = f"worker {ended[0]} exited with {codes[ended[0]]}"
            elif now > end:
                reason = f"not finished after {time_limit:g} s"
            time.sleep(0.02)
        for process in self._processes:  # the others write their stacks
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return reason

    def _log_tail(self, worker: int, begin: int) -> str:
        """The end of the log of a worker, from a byte on."""
        log = self._log(worker).read_bytes()[begin:].decode(errors="replace")
        return f"--- worker {worker}\n{log[-LOG_TAIL:]}"


def worker_environment(index: int, addresses: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker: CPU only, one thread, no proxy."""
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
