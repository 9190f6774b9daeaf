"""Rendezvous of all workers before TensorFlow starts.

TensorFlow's start prints nothing and has no timeout: if a worker is missing,
or two have the same index, all others wait for ever. Therefore the workers
first connect to the address of worker 0, which TensorFlow uses afterwards.
Worker 0 starts all workers when all are connected. The connections stay open
for the messages of `channel.py`.

A worker must know only the address of worker 0. It sends the address at which
it will listen, and receives the addresses of all workers from worker 0.

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
    PEER,
    SECRET_VARIABLE,
    WORKER_0,
    Greeting,
    Session,
    make_nonce,
    read_secret,
)
from tfkfac.cluster.channel import Connection
from tfkfac.cluster.config import Cluster, split_address
from tfkfac.cluster.coordinator import accept_workers
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

    Raises:
        TimeoutError: If a worker does not connect in time.
        RefusedError: If worker 0 refuses this worker, because it has another
            cluster, job or secret, or the index of a connected worker.
    """
    if len(cluster.addresses) == 1:
        return Rendezvous(cluster, {}, None)
    secret = read_secret(os.environ)
    wait = Wait(cluster, timeout)
    if cluster.index == 0:
        return accept_workers(cluster, secret, wait)
    return _join(cluster, secret, wait)


class _UnreachableError(Exception):
    """Worker 0 cannot be reached; the text is the cause."""


def _join(cluster: Cluster, secret: bytes, wait: Wait) -> Rendezvous:
    """Connect to worker 0 and wait for its start message."""
    connector = _Connector(*split_address(cluster.addresses[0]))
    process = make_nonce()
    with socket.socket() as port_holder:
        port_holder.bind(("", 0))  # reserve a port for TensorFlow
        port = port_holder.getsockname()[1]
        while True:
            try:
                sock = connector.connect(wait)
                with contextlib.ExitStack() as stack:
                    connection = Connection(sock, waiting.TIMEOUT_S)
                    stack.callback(connection.close)
                    addresses = list(cluster.addresses)
                    if not addresses[cluster.index]:
                        host = _reachable_host(sock, cluster)
                        addresses[cluster.index] = f"{host}:{port}"
                    greeting = Greeting(
                        cluster.index,
                        tuple(addresses),
                        cluster.job,
                        process,
                        make_nonce(),
                    )
                    _shake_hands(connection, greeting, secret, cluster, wait)
                    result = _wait_for_start(
                        connection, greeting, cluster, wait
                    )
                    stack.pop_all()
                    return result
            except _UnreachableError as error:
                wait.cause = str(error)
            wait.check([0])
            time.sleep(wait.remaining(waiting.POLL_INTERVAL_S))


def _reachable_host(sock: socket.socket, cluster: Cluster) -> str:
    """Return the host at which the other workers reach this process.

    This is the local address of the connection to worker 0. On the host of
    worker 0 it is worker 0's host, because a loopback address is not unique.
    """
    local_ip, remote_ip = sock.getsockname()[0], sock.getpeername()[0]
    if local_ip == remote_ip or is_loopback(local_ip):
        return cluster.addresses[0].rpartition(":")[0]
    return f"[{local_ip}]" if ":" in local_ip else str(local_ip)


def _shake_hands(
    connection: Connection,
    greeting: Greeting,
    secret: bytes,
    cluster: Cluster,
    wait: Wait,
) -> None:
    """Send the greeting and exchange proofs of the secret with worker 0."""
    connection.send(dataclasses.asdict(greeting))
    answer = connection.receive(wait.remaining(waiting.TIMEOUT_S)) or {}
    nonce, proof = answer.get("nonce"), answer.get("proof")
    if not isinstance(nonce, str) or not isinstance(proof, str):
        raise _UnreachableError(
            "a process accepts the connection there, but does not answer as "
            "worker 0 of this version of tfkfac"
        )
    session = Session(secret, greeting, nonce)
    if not session.verify(WORKER_0, proof):
        raise RefusedError(
            f"{cluster.name(0)} cannot prove that it has the secret of this "
            f"process: environment variable {SECRET_VARIABLE} must be the same "
            "on all workers of a job, or unset on all. It may be worker 0 of "
            f"another job. Received: {'a' if secret else 'no'} secret on "
            f"worker {cluster.index}, another one or none on worker 0"
        )
    connection.send({"proof": session.prove(PEER)})
    if secret:
        connection.enable_mac(session.key(PEER), session.key(WORKER_0))


def _wait_for_start(
    connection: Connection, greeting: Greeting, cluster: Cluster, wait: Wait
) -> Rendezvous:
    """Wait for the message "go" of worker 0."""
    size, limit = len(cluster.addresses), waiting.TIMEOUT_S
    while (message := connection.receive(wait.remaining(limit))) is not None:
        wait.cause = ""
        match message:
            case {"refused": str(text)}:
                raise RefusedError(escape(text))
            case {"timeout": str(text)}:
                raise TimeoutError(escape(text))
            case {"go": list(addresses), "seed": int(seed)} if _is_valid(
                addresses, greeting
            ):
                full_cluster = dataclasses.replace(
                    cluster, addresses=tuple(addresses)
                )
                return Rendezvous(full_cluster, {0: connection}, seed)
            case {"missing": list(missing)}:
                wait.check(
                    [i for i in missing if type(i) is int and 0 <= i < size]
                    or [0]
                )
            case _:
                break
    raise _UnreachableError("worker 0 has ended the connection or is silent")


def _is_valid(addresses: Sequence[Any], greeting: Greeting) -> bool:
    """Return True if the addresses from worker 0 agree with the greeting."""
    expected_addresses = greeting.cluster
    if len(addresses) != len(expected_addresses):
        return False
    for address, expected in zip(addresses, expected_addresses, strict=True):
        if not isinstance(address, str) or expected not in ("", address):
            return False
        try:
            split_address(address)
        except ValueError:
            return False
    return True


class _Connector:
    """Connect to a host and port within a timeout.

    A thread resolves the host name, because `getaddrinfo` has no timeout.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_running = False

    def connect(self, wait: Wait) -> socket.socket:
        """Return a connected socket, or raise the cause of the last failure."""
        cause = "it has no address"
        targets = self._resolve(wait.remaining(waiting.SHORT_TIMEOUT_S))
        seconds = max(
            waiting.TIMEOUT_S / max(len(targets), 1), waiting.SHORT_TIMEOUT_S
        )
        for family, type_, protocol, _, address in targets:
            sock = socket.socket(family, type_, protocol)
            try:
                sock.settimeout(wait.remaining(seconds))
                sock.connect(address)
            except ConnectionRefusedError:
                cause = "the connection is refused, no process listens there"
            except OSError as error:
                cause = f"it cannot be reached ({error.strerror or error})"
            else:
                return sock
            sock.close()
        raise _UnreachableError(cause)

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
            raise _UnreachableError(
                f"{name} (no answer of the name server)"
            ) from None
        self._is_running = False
        if isinstance(result, Exception):
            cause = getattr(result, "strerror", None) or result
            raise _UnreachableError(f"{name} ({cause})")
        return list(result)

    def _run(self) -> None:
        try:
            result: Any = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            result = error
        self._results.put(result)
