"""Clusters of local processes that run functions of the tests.

A `Pool` keeps its cluster for the next call, and replaces it if a call fails
or needs another `Shape`.
"""

import contextlib
import dataclasses
import multiprocessing.connection
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from tests.support.ports import address, claim_ports
from tests.support.programs import Program

TIME_LIMIT_S = 180.0  # of a call, the start of the cluster included
LOG_TAIL = 12_000  # characters of each worker's log in an error message
GRACE_S = 10.0  # for the other workers after one has failed
Call = Callable[..., Any]


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
    """Processes that run one function after the other."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._workers = range(shape.workers)
        self._connections: list[Connection] = []
        self._programs: list[Program] = []
        self._results: dict[int, Any] = {}  # value and traceback by worker
        with contextlib.ExitStack() as opened:
            ports = claim_ports(shape.workers)
            addresses = [address(opened.enter_context(port)) for port in ports]
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.settimeout(TIME_LIMIT_S)
            listener.bind(path := f"{folder}/calls")
            listener.listen()
            module = "tests.support.worker_process"
            command = [sys.executable, "-m", module, path, shape.devices]
            for index in self._workers:
                program = Program(command, addresses, index, shape.environment)
                self._programs.append(opened.enter_context(program))
                connected, _ = listener.accept()
                connected.setblocking(True)
                self._connections.append(Connection(connected.detach()))
            opened.callback(self._end)
            self._opened = opened.pop_all()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and free their ports."""
        self._opened.close()

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 5
        for program in self._programs:
            with contextlib.suppress(AssertionError):  # killed afterwards
                program.end(deadline - time.monotonic())

    def run(self, function: Call, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every worker; return the values by worker."""
        begin = [program.log.stat().st_size for program in self._programs]
        target = f"{function.__module__}:{function.__name__}"
        call = target, args, kwargs
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
        logs = [
            program.log.read_bytes()[first:].decode(errors="replace")
            for program, first in zip(self._programs, begin, strict=True)
        ]
        tails = [
            f"--- worker {worker}\n{log[-LOG_TAIL:]}"
            for worker, log in enumerate(logs)
        ]
        raise ClusterError("\n".join([f"{target}{args}: {reason}", *tails]))

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
                code = self._programs[ended[0]].end()
                reason = f"worker {ended[0]} exited with {code}"
            elif now > end:
                reason = f"not finished after {TIME_LIMIT_S:g} s"
        for program in self._programs:  # the others write their stacks
            if not program.ended_s:
                program.send(signal.SIGUSR1)
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
