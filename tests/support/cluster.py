"""Clusters of local processes that run functions of the tests.

A `Pool` keeps its cluster for the next call, and replaces it if a call fails
or needs another `Shape`.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.support.ports import address, claim_ports
from tests.support.worker_process import main

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT_S = 180.0  # of a call, the start of the cluster included
LOG_TAIL = 4000  # characters of each worker's log in an error message
GRACE_S = 10.0  # for the other workers after one has failed
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tfkfac"])
Call = str | Callable[..., Any]  # or "module:name"
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Processes of a cluster.

    Attributes:
        workers: Number of processes; a single process gets no `TF_CONFIG`.
        devices: Logical CPUs of each process.
        environment: Variables to set in every process, after the import of
            TensorFlow.
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


def run(function: Call, *args: Any, **shape: Any) -> list[Any]:
    """Call a function on every worker of a new cluster of a `Shape`."""
    with Cluster(Shape(**shape)) as cluster:
        return cluster.run(function, *args)


class Pool(contextlib.AbstractContextManager["Pool"]):
    """The cluster of the last call, replaced if broken or of another shape."""

    def __init__(self, startup: Callable[[], None] | None = None) -> None:
        self._startup = startup  # the first call of every new cluster
        self._cluster: Cluster | None = None

    def run(
        self, shape: Shape, function: Call, *args: Any, **kwargs: Any
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
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def __exit__(self, *error: object) -> None:
        self.close()


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """Processes that run one function after the other.

    Each process is a fork of a server that has imported tfkfac, because the
    import takes seconds. All forks have the same string hashes; the workers of
    `tests/tools/test_launch.py` do not.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._workers = range(shape.workers)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._results: dict[int, Any] = {}  # value and traceback by worker
        with contextlib.ExitStack() as opened:
            folder = tempfile.TemporaryDirectory(prefix="cluster-")
            self._directory = pathlib.Path(opened.enter_context(folder))
            ports = claim_ports(shape.workers)
            addresses = [address(opened.enter_context(port)) for port in ports]
            opened.callback(self._end)
            for index in self._workers:
                self._start(index, addresses)
            self._opened = opened.pop_all()

    def _start(self, index: int, addresses: Sequence[str]) -> None:
        environment = worker_environment(index, addresses)
        environment |= self.shape.environment
        self._log(index).touch()
        parent_end, worker_end = multiprocessing.Pipe()
        log = str(self._log(index))
        process = FORKS.Process(
            target=main,
            args=(worker_end, log, environment, self.shape.devices),
            daemon=True,
        )
        process.start()
        worker_end.close()
        self._connections.append(parent_end)
        self._processes.append(process)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and free their ports."""
        self._opened.close()

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # if it has no group yet
                process.join()

    def run(self, function: Call, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every worker; return the values by worker."""
        begin = [self._log(worker).stat().st_size for worker in self._workers]
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__name__}"
        call = function, args, kwargs
        self._results = {}
        for connection in self._connections:
            with contextlib.suppress(OSError):  # `_wait` reports a dead worker
                connection.send_bytes(pickle.dumps(call))
        reason = self._wait()
        if reason is None:
            results = [self._results[worker] for worker in self._workers]
            if not any(result[1] for result in results):
                return [result[0] for result in results]
            reason = "a worker raised"
        logs = map(self._log_tail, self._workers, begin)
        raise ClusterError("\n".join([f"{function}{args}: {reason}", *logs]))

    def _log(self, index: int) -> pathlib.Path:
        return self._directory / f"worker{index}.log"

    def _wait(self) -> str | None:
        """Wait for all workers; return why some did not end, if so."""
        end = time.monotonic() + TIME_LIMIT_S
        deadline: float | None = None  # of the others after a failure
        reason = None
        while reason is None:
            ended = self._receive()
            if len(self._results) == len(self._workers):
                return None
            now = time.monotonic()
            failed = [w for w, result in self._results.items() if result[1]]
            if failed:
                deadline = deadline or now + GRACE_S
            if deadline is not None and now > deadline:
                reason = f"worker {failed[0]} failed and the others did not"
            elif ended:
                process = self._processes[ended[0]]
                process.join()
                reason = f"worker {ended[0]} exited with {process.exitcode}"
            elif now > end:
                reason = f"not finished after {TIME_LIMIT_S:g} s"
        for process in self._processes:  # the others write their stacks
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return reason

    def _receive(self) -> list[int]:
        """Receive results for a moment; return the workers that exited."""
        ended = []
        waiting = {
            connection: worker
            for worker, connection in enumerate(self._connections)
            if worker not in self._results
        }
        for ready in multiprocessing.connection.wait(list(waiting), 0.1):
            assert isinstance(ready, Connection)
            try:
                result = pickle.loads(ready.recv_bytes())
                self._results[waiting[ready]] = result
            except (EOFError, ConnectionResetError):
                ended.append(waiting[ready])
        return ended

    def _log_tail(self, worker: int, begin: int) -> str:
        """Return the last `LOG_TAIL` characters of a log after a byte."""
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
