"""Rendezvous of all workers before TensorFlow starts.

TensorFlow's own start has neither a message nor an end: a worker that never
comes, or an index given twice, leaves all others waiting in it. So the workers
meet before, at the address of worker 0, which TensorFlow uses afterwards. Each
other worker keeps a connection to worker 0, which lets all of them go on when
all are there. The connections stay, for the messages of `channel.py`.

Only the address of worker 0 has to be known: the others say where they will
listen, and learn the other addresses from worker 0.

A connection begins with four lines of JSON:

1. peer to worker 0: a `Greeting`, with a nonce.
2. worker 0 to peer: its nonce and its proof of the secret.
3. peer to worker 0: its proof of the secret.
4. worker 0 to peer: "missing" (admitted) or "refused" with the reason.
"""

import contextlib
import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from tfkfac.cluster import waiting
from tfkfac.cluster.authentication import (
    FIRST,
    OTHER,
    VARIABLE,
    Greeting,
    Session,
    make_nonce,
    read_secret,
)
from tfkfac.cluster.channel import Line
from tfkfac.cluster.config import Cluster, split_address
from tfkfac.cluster.reception import receive_all
from tfkfac.cluster.waiting import (
    RefusedError,
    Rendezvous,
    Wait,
    escape,
    is_loopback,
    quote,
)


def wait_for_all(cluster: Cluster, timeout: float | None) -> Rendezvous:
    """Wait until all workers have called this function.

    Args:
        cluster: The cluster as far as this worker knows it.
        timeout: Seconds to wait for the other workers; None is for ever.

    Raises:
        TimeoutError: If a worker is not there in time. The message names it.
        RefusedError: If worker 0 refuses this worker, because it has another
            cluster, job or secret, or the index of a worker that is there.
        ValueError: If the file of the secret cannot be read.
    """
    if len(cluster.addresses) == 1:
        return Rendezvous(cluster, {}, None)
    secret = read_secret(os.environ)
    wait = Wait(cluster, timeout)
    if cluster.index == 0:
        return receive_all(cluster, secret, wait)
    return _report_to_first(cluster, secret, wait)


class _NoAnswerError(Exception):
    """Worker 0 is not reached; the text is the cause."""


def _report_to_first(cluster: Cluster, secret: bytes, wait: Wait) -> Rendezvous:
    """Connect to worker 0 and wait until all may go on."""
    lookup = _Lookup(*split_address(cluster.addresses[0]))
    process = make_nonce()
    with socket.socket() as claim:
        claim.bind(("", 0))  # so that nobody else is given this port
        port = claim.getsockname()[1]
        while True:
            try:
                connection = lookup.connect(wait)
                with contextlib.ExitStack() as stack:
                    line = Line(connection, waiting.TIMEOUT_S)
                    stack.callback(line.close)
                    known = list(cluster.addresses)
                    if not known[cluster.index]:
                        host = _host_here(connection, cluster)
                        known[cluster.index] = f"{host}:{port}"
                    greeting = Greeting(
                        cluster.index,
                        tuple(known),
                        cluster.job,
                        process,
                        make_nonce(),
                    )
                    _greet(line, greeting, secret, cluster, wait)
                    result = _wait_for_go(line, greeting, cluster, wait)
                    stack.pop_all()
                    return result
            except _NoAnswerError as error:
                wait.cause = str(error)
            wait.check([0])
            time.sleep(wait.left(waiting.POLL_INTERVAL_S))


def _host_here(connection: socket.socket, cluster: Cluster) -> str:
    """Return the host at which the other workers reach this process.

    It is where messages to worker 0 leave. On the host of worker 0 this may be
    an address which other hosts have, too, but that of worker 0 is valid.
    """
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    if here == there or is_loopback(here):
        return cluster.addresses[0].rpartition(":")[0]
    return f"[{here}]" if ":" in here else str(here)


def _greet(
    line: Line,
    greeting: Greeting,
    secret: bytes,
    cluster: Cluster,
    wait: Wait,
) -> None:
    """Exchange greetings and proofs with worker 0.

    Raises:
        RefusedError: If worker 0 has another secret.
    """
    line.send(dataclasses.asdict(greeting))
    answer = line.receive(wait.left(waiting.TIMEOUT_S)) or {}
    nonce, proof = answer.get("nonce"), answer.get("proof")
    if not isinstance(nonce, str) or not isinstance(proof, str):
        raise _NoAnswerError(
            "a process accepts the connection there, but does not answer as "
            "worker 0 of this version of tfkfac"
        )
    session = Session(secret, greeting, nonce)
    if not session.is_proved(FIRST, proof):
        raise RefusedError(
            f"{cluster.name(0)} cannot prove that it has the secret of this "
            f"process: environment variable {VARIABLE} must be the same on "
            "all workers of a job, or unset on all. It may be worker 0 of "
            f"another job. Received: {'a' if secret else 'no'} secret on "
            f"worker {cluster.index}, another one or none on worker 0"
        )
    line.send({"proof": session.prove(OTHER)})
    if secret:
        line.protect(session.key(OTHER), session.key(FIRST))


def _wait_for_go(
    line: Line, greeting: Greeting, cluster: Cluster, wait: Wait
) -> Rendezvous:
    """Wait for the message "go" of worker 0.

    Raises:
        RefusedError: If worker 0 refuses this worker, or its own start.
        TimeoutError: If the time of this worker or of worker 0 is over.
    """
    size = len(cluster.addresses)
    while (message := line.receive(wait.left(waiting.TIMEOUT_S))) is not None:
        wait.cause = ""
        match message:
            case {"refused": str(text)}:
                raise RefusedError(escape(text))
            case {"timeout": str(text)}:
                raise TimeoutError(escape(text))
            case {"go": list(addresses), "seed": int(seed)} if _is_valid(
                addresses, greeting
            ):
                complete = dataclasses.replace(
                    cluster, addresses=tuple(addresses)
                )
                return Rendezvous(complete, {0: line}, seed)
            case {"missing": list(missing)}:
                wait.check(
                    [i for i in missing if type(i) is int and 0 <= i < size]
                    or [0]
                )
            case _:
                break
    raise _NoAnswerError("worker 0 has ended the connection or is silent")


def _is_valid(addresses: Sequence[Any], greeting: Greeting) -> bool:
    """Return True if worker 0's addresses agree with those known here."""
    known = greeting.cluster
    if len(addresses) != len(known):
        return False
    for address, expected in zip(addresses, known, strict=True):
        if not isinstance(address, str) or expected not in ("", address):
            return False
        try:
            split_address(address)
        except ValueError:
            return False
    return True


class _Lookup:
    """Connections to a host and port, with limits of time.

    A thread resolves the name: a name server that does not answer would hold
    the caller beyond its deadline.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_running = False

    def connect(self, wait: Wait) -> socket.socket:
        """Return a connection.

        Raises:
            _NoAnswerError: If there is none. The text is the cause.
        """
        last = "it has no address"
        targets = self._resolve(wait.left(waiting.SHORT_TIMEOUT_S))
        seconds = max(
            waiting.TIMEOUT_S / max(len(targets), 1), waiting.SHORT_TIMEOUT_S
        )
        for family, type_, protocol, _, address in targets:
            connection = socket.socket(family, type_, protocol)
            try:
                connection.settimeout(wait.left(seconds))
                connection.connect(address)
            except ConnectionRefusedError:
                last = "the connection is refused, no process listens there"
            except OSError as error:
                last = f"it cannot be reached ({error.strerror or error})"
            else:
                return connection
            connection.close()
        raise _NoAnswerError(last)

    def _resolve(self, seconds: float) -> list[Any]:
        if not self._is_running:
            self._is_running = True
            threading.Thread(
                target=self._run, name="tfkfac name resolution", daemon=True
            ).start()
        name = f"the host name {quote(self._host)} cannot be resolved"
        try:
            result = self._results.get(timeout=seconds)
        except queue.Empty:
            raise _NoAnswerError(
                f"{name} (no answer of the name server)"
            ) from None
        self._is_running = False
        if isinstance(result, Exception):
            cause = getattr(result, "strerror", None) or result
            raise _NoAnswerError(f"{name} ({cause})")
        return list(result)

    def _run(self) -> None:
        try:
            result: Any = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            result = error
        self._results.put(result)
