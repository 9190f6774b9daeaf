"""Workers wait for each other before TensorFlow does, and say for whom.

TensorFlow's own start has neither a message nor an end: a worker that never
comes, or an index given twice, leaves all others waiting in it. So the workers
meet before, at the address of the first one, which TensorFlow uses afterwards.
Each of the others keeps a connection there and says who it is; when all are
there, the first one lets all of them go on.
"""

import contextlib
import errno
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfkfac.distributed.cluster import Cluster, split_address

# Seconds between two looks; for a process that has come to say who it is; until
# the first message, for a peer to answer, and for a process of an earlier job
# to leave the port.
_LOOK = 0.1
_MANNERS = 1.0
_PATIENCE = 5.0
_LONGEST_LINE = 2**20


class RefusedError(ValueError):
    """The workers cannot train together."""


def wait_for_all(cluster: Cluster, timeout: float | None) -> None:
    """Returns when all workers of a cluster have called it.

    Args:
        cluster: The workers.
        timeout: Seconds to wait for the others; None is for ever.

    Raises:
        TimeoutError: If a worker is not there in time. The message names it.
        RefusedError: If two processes have one index, or workers know of
            different clusters.
    """
    if len(cluster.addresses) == 1:
        return
    clock = _Clock(cluster, timeout)
    if cluster.index == 0:
        _receive_all(cluster, clock)
    else:
        _report_to_first(cluster, clock)


class _Clock:
    """Tells the user for whom this worker waits, and when it is too long."""

    def __init__(self, cluster: Cluster, timeout: float | None) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._start = time.monotonic()
        self._next = _PATIENCE

    def waiting_for(self, missing: Sequence[int]) -> None:
        """Says now and then who is missing.

        Raises:
            TimeoutError: If the time is over.
        """
        names = ", ".join(self._cluster.name(i) for i in missing)
        passed = time.monotonic() - self._start
        if self._timeout is not None and passed > self._timeout:
            raise TimeoutError(
                f"Worker {self._cluster.index} has waited {self._timeout:g} "
                f"seconds for {names}. Start every worker with the same "
                "cluster in `TF_CONFIG` and an index of its own; argument "
                "`start_timeout` of the strategy is how long they wait."
            )
        if passed > self._next:
            self._next = passed + max(self._next, 6 * _PATIENCE)
            print(
                f"tfkfac: worker {self._cluster.index} is waiting for {names} "
                f"({passed:.0f} s)",
                file=sys.stderr,
                flush=True,
            )


# ------------------------------------------------------------ the first worker
def _receive_all(cluster: Cluster, clock: _Clock) -> None:
    """Waits for the others and lets them go on, or tells them why not."""
    present: dict[int, _Line] = {}
    everyone = range(1, len(cluster.addresses))
    with _listen(cluster) as server, contextlib.ExitStack() as lines:
        try:
            while missing := [i for i in everyone if i not in present]:
                clock.waiting_for(missing)
                _send_all(present, {"missing": missing})
                new = _accept(server)
                for i in [i for i, line in present.items() if line.closed]:
                    del present[i]
                if new is not None:
                    lines.enter_context(new)
                    _admit(new, cluster, present)
        except (RefusedError, TimeoutError) as error:
            kind = "refused" if isinstance(error, RefusedError) else "timeout"
            _send_all(present, {kind: str(error)})
            raise
        _send_all(present, {"go": True})
        # They hang up first: the port is then free for TensorFlow at once.
        for line in present.values():
            line.wait_until_closed()


def _admit(
    line: "_Line", cluster: Cluster, present: dict[int, "_Line"]
) -> None:
    """Enters a worker that has just come."""
    hello = line.receive() or {}
    index, addresses = hello.get("worker"), hello.get("cluster")
    if not isinstance(index, int):
        return  # not one of ours
    if addresses != list(cluster.addresses):
        line.send({"refused": _other_cluster(index, addresses, cluster)})
        raise RefusedError(_other_cluster(index, addresses, cluster))
    if index in present:
        text = (
            f"Two processes are {cluster.name(index)}: each needs a task "
            "index of its own in `TF_CONFIG`."
        )
        line.send({"refused": text})
        raise RefusedError(text)
    present[index] = line


def _other_cluster(index: int, theirs: Any, cluster: Cluster) -> str:
    return (
        "All workers must have the same cluster in `TF_CONFIG`. Received: "
        f"{theirs} on worker {index}, {list(cluster.addresses)} on worker 0"
    )


@contextlib.contextmanager
def _listen(cluster: Cluster) -> Iterator[socket.socket]:
    """The own port, which a process of an earlier job may be about to leave."""
    deadline = time.monotonic() + _PATIENCE
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            server = socket.create_server(
                ("", cluster.own_port), family=family, dualstack_ipv6=dual
            )
            break
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            if not in_use or time.monotonic() > deadline:
                raise RefusedError(
                    f"This process cannot be {cluster.name(0)}: "
                    f"{error.strerror}. Is another process of this machine "
                    "worker 0, too, or has an earlier job not ended?"
                ) from error
            time.sleep(_LOOK)
    with server:
        server.settimeout(_LOOK)
        yield server


def _accept(server: socket.socket) -> "_Line | None":
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return None
    return _Line(connection, _MANNERS)


def _send_all(lines: Mapping[int, "_Line"], message: Any) -> None:
    for line in lines.values():
        line.send(message)


# ------------------------------------------------------------ the other workers
def _report_to_first(cluster: Cluster, clock: _Clock) -> None:
    """Tells the first worker that this one is there, and waits for its word."""
    address = split_address(cluster.addresses[0])
    hello = {"worker": cluster.index, "cluster": list(cluster.addresses)}
    while True:
        try:
            connection = socket.create_connection(address, timeout=_PATIENCE)
        except OSError:
            clock.waiting_for([0])
            time.sleep(_LOOK)
            continue
        with _Line(connection, _PATIENCE) as line:
            line.send(hello)
            if _may_go_on(line, clock.waiting_for):
                return
        clock.waiting_for([0])
        time.sleep(_LOOK)


def _may_go_on(
    line: "_Line", waiting_for: Callable[[Sequence[int]], None]
) -> bool:
    """Whether the first worker has let this one go on; else it is gone."""
    while (message := line.receive()) is not None:
        if "go" in message:
            return True
        if "refused" in message:
            raise RefusedError(message["refused"])
        if "timeout" in message:
            raise TimeoutError(message["timeout"])
        waiting_for(message.get("missing", [0]))
    return False


class _Line:
    """A connection on which messages are lines of JSON.

    Args:
        connection: The connection.
        timeout: Seconds that the other side has to say something.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        self._socket = connection
        self._reader = connection.makefile("rb")
        self.closed = False

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()
        self._socket.close()

    def send(self, message: Any) -> None:
        """Sends a message, if there is still somebody."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if none comes or it is not one of ours."""
        try:
            message = json.loads(self._reader.readline(_LONGEST_LINE))
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def wait_until_closed(self) -> None:
        """Waits until the other side hangs up, but not for long."""
        with contextlib.suppress(OSError):
            self._reader.read(1)
