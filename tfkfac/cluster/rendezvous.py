"""Meeting of all workers before TensorFlow starts, with messages and an end.

TensorFlow's own start has neither a message nor an end: a worker that never
comes, or an index given twice, leaves all others waiting in it. So the workers
meet before, at the address of the first one, which TensorFlow uses afterwards.
Each of the others keeps a connection there and says who it is; when all are
there, the first one lets all of them go on. The connections stay, for the
messages of `channel.py`.

Only the address of the first worker has to be known: the others say where they
will listen, and learn it of each other.
"""

import contextlib
import errno
import ipaddress
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfkfac.cluster.channel import Line, Message
from tfkfac.cluster.config import Cluster, split_address

# Seconds between two looks; for a process that has come to say who it is; until
# the first message, for a peer to answer, and for a process of an earlier job
# to leave the port.
_LOOK = 0.1
_MANNERS = 1.0
_PATIENCE = 5.0


WaitingFor = Callable[[Sequence[int]], None]  # some that are missing


class RefusedError(ValueError):
    """The workers cannot train together."""


class Rendezvous(NamedTuple):
    """The result of the rendezvous of all workers.

    Attributes:
        cluster: The cluster with the addresses of all workers.
        lines: Open connections by worker index. Worker 0 has one to each
            other worker; each other worker has one to worker 0.
        seed: Random integer in [0, 2^31), equal on all workers; None if
            there is one worker.
    """

    cluster: Cluster
    lines: dict[int, Line]
    seed: int | None


def wait_for_all(cluster: Cluster, timeout: float | None) -> Rendezvous:
    """Wait until all workers have called this function.

    Args:
        cluster: The cluster as far as this worker knows it.
        timeout: Seconds to wait for the other workers; None is for ever.

    Raises:
        TimeoutError: If a worker is not there in time. The message names it.
        RefusedError: If two processes have one index, or workers know of
            different clusters.
    """
    if len(cluster.addresses) == 1:
        return Rendezvous(cluster, {}, None)
    waiting_for = _waiting(cluster, timeout)
    if cluster.index == 0:
        return _receive_all(cluster, waiting_for)
    return _report_to_first(cluster, waiting_for)


def _waiting(cluster: Cluster, timeout: float | None) -> WaitingFor:
    """Begins to wait: says now and then for whom, and raises at the end."""
    start, remind = time.monotonic(), _PATIENCE

    def waiting_for(missing: Sequence[int]) -> None:
        nonlocal remind
        names = ", ".join(cluster.name(i) for i in missing)
        passed = time.monotonic() - start
        if timeout is not None and passed > timeout:
            raise TimeoutError(
                f"Worker {cluster.index} has waited {timeout:g} seconds for "
                f"{names}. Start every worker with the same cluster and an "
                "index of its own; argument `start_timeout` of the strategy "
                "is how long they wait."
            )
        if passed > remind:
            remind = passed + max(remind, 6 * _PATIENCE)
            print(
                f"tfkfac: worker {cluster.index} is waiting for {names} "
                f"({passed:.0f} s)",
                file=sys.stderr,
                flush=True,
            )

    return waiting_for


# ------------------------------------------------------------ the first worker
def _receive_all(cluster: Cluster, waiting_for: WaitingFor) -> Rendezvous:
    """Waits for the others; lets them go on, or tells them why not."""
    present: dict[int, Line] = {}
    addresses = list(cluster.addresses)
    everyone = range(1, len(cluster.addresses))
    with _listen(cluster) as server, contextlib.ExitStack() as lines:
        try:
            while missing := [i for i in everyone if i not in present]:
                waiting_for(missing)
                _send_all(present, {"missing": missing})
                for i in [i for i, line in present.items() if line.closed]:
                    present.pop(i).close()
                with contextlib.suppress(TimeoutError):
                    new = Line(server.accept()[0], _MANNERS)
                    lines.callback(new.close)
                    _admit(new, cluster, present, addresses)
        except (RefusedError, TimeoutError) as error:
            kind = "refused" if isinstance(error, RefusedError) else "timeout"
            _send_all(present, {kind: str(error)})
            raise
        seed = secrets.randbits(31)
        _send_all(present, {"go": addresses, "seed": seed})
        # TensorFlow may listen where these are: nobody else does any more.
        lines.pop_all()
        return Rendezvous(Cluster(tuple(addresses), 0), present, seed)


def _admit(
    line: Line,
    cluster: Cluster,
    present: dict[int, Line],
    addresses: list[str],
) -> None:
    """Enters a worker that has just connected, and its address."""
    hello = line.receive() or {}
    index, theirs = hello.get("worker"), hello.get("cluster")
    ours = list(cluster.addresses)
    if not isinstance(index, int) or not isinstance(theirs, list):
        line.close()  # not one of ours
        return
    # Of what both know.
    agree = len(theirs) == len(ours) and all(
        a == b for a, b in zip(theirs, ours, strict=True) if a and b
    )
    if agree and index not in present:
        present[index] = line
        addresses[index] = theirs[index]
        return
    text = (
        f"Two processes are {cluster.name(index)}: each needs an index of its "
        "own."
        if agree
        else "All workers must have the same cluster. "
        f"Received: {theirs} on worker {index}, {ours} on worker 0"
    )
    line.send({"refused": text})
    raise RefusedError(text)


@contextlib.contextmanager
def _listen(cluster: Cluster) -> Iterator[socket.socket]:
    """The own port, once a process of an earlier job has left it."""
    deadline = time.monotonic() + _PATIENCE
    _, port = split_address(cluster.addresses[0])
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = None
    while server is None:
        try:
            server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual
            )
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


def _send_all(lines: Mapping[int, Line], message: Message) -> None:
    for line in lines.values():
        line.send(message)


# ------------------------------------------------------------ the other workers
def _report_to_first(cluster: Cluster, waiting_for: WaitingFor) -> Rendezvous:
    """Connects with the first worker and waits until all may go on."""
    first = split_address(cluster.addresses[0])
    with socket.socket() as claim:
        claim.bind(("", 0))  # so that nobody else is given this port
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    connection = socket.create_connection(first, _PATIENCE)
                except OSError:
                    pass
                else:
                    line = Line(connection, _PATIENCE)
                    stack.callback(line.close)
                    known = list(cluster.addresses)
                    if not known[cluster.index]:
                        host = _own_host(connection, cluster)
                        port = claim.getsockname()[1]
                        known[cluster.index] = f"{host}:{port}"
                    line.send({"worker": cluster.index, "cluster": known})
                    if go := _may_go_on(line, waiting_for):
                        stack.pop_all()
                        complete = Cluster(tuple(go["go"]), cluster.index)
                        return Rendezvous(complete, {0: line}, go["seed"])
            waiting_for([0])
            time.sleep(_LOOK)


def _own_host(connection: socket.socket, cluster: Cluster) -> str:
    """The host at which the others find this process.

    It is where messages to the first worker leave. On the host of that one
    this may be an address which others have too, but its own is good for all.
    """
    own, theirs = connection.getsockname()[0], connection.getpeername()[0]
    if own == theirs or ipaddress.ip_address(own).is_loopback:
        return cluster.addresses[0].rpartition(":")[0]
    return f"[{own}]" if ":" in own else own


def _may_go_on(line: Line, waiting_for: WaitingFor) -> Message | None:
    """Return the message "go" of worker 0; None if worker 0 is gone."""
    while (message := line.receive()) is not None:
        if "go" in message:
            return message
        if "refused" in message:
            raise RefusedError(message["refused"])
        if "timeout" in message:
            raise TimeoutError(message["timeout"])
        waiting_for(message.get("missing", [0]))
    return None
