"""Worker 0's side of the rendezvous: accept all other workers.

Any process can connect to the port of worker 0. Worker 0 reports a message
that is not a greeting, and drops its connection. A process whose greeting is
valid but which cannot take part, for example of another job, receives the
reason before worker 0 drops it. In both cases worker 0 continues to wait.
"""

import contextlib
import dataclasses
import errno
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfkfac.cluster import waiting
from tfkfac.cluster.authentication import (
    PEER,
    SECRET_VARIABLE,
    WORKER_0,
    Greeting,
    Session,
    make_nonce,
)
from tfkfac.cluster.channel import MAX_MESSAGE_BYTES, Connection, Message, parse
from tfkfac.cluster.config import Cluster, split_address
from tfkfac.cluster.waiting import (
    RefusedError,
    Rendezvous,
    Wait,
    is_loopback,
    normalize_host,
    print_line,
    quote,
)

# Maximum number of unfinished handshakes, which bounds memory and open files.
# Above this number worker 0 drops the oldest connection; a worker whose
# connection is dropped connects again.
_MAX_PENDING = 256
_MAX_PRINTED = 20  # lines on dropped connections that were not admitted
# Maximum size of a greeting: fixed bytes, plus bytes for each address.
_GREETING_BYTES, _ADDRESS_BYTES = 2**16, 300
_HEARTBEAT_INTERVAL_S = 1.0  # between two messages "missing" to a worker


def accept_workers(cluster: Cluster, secret: bytes, wait: Wait) -> Rendezvous:
    """As worker 0, accept all other workers; then start all of them."""
    with (
        _listen(cluster, secret, wait) as servers,
        selectors.DefaultSelector() as selector,
        contextlib.ExitStack() as connections,
    ):
        coordinator = _Coordinator(cluster, secret, wait, selector)
        connections.callback(coordinator.close)
        for server in servers:
            selector.register(server, selectors.EVENT_READ)
        try:
            while missing := coordinator.missing():
                wait.check(missing)
                coordinator.send_missing(missing)
                events = selector.select(
                    wait.remaining(waiting.POLL_INTERVAL_S)
                )
                peers = [key.data for key, _ in events if key.data is not None]
                # Read admitted connections first: a worker whose connection
                # has ended may have sent a greeting on a new connection.
                for peer in sorted(peers, key=lambda p: not p.is_admitted):
                    coordinator.receive(peer)
                for key, _ in events:
                    if key.data is None:
                        coordinator.accept(key.fileobj)
                coordinator.drop_expired()
        except (RefusedError, TimeoutError) as error:
            is_refused = isinstance(error, RefusedError)
            coordinator.send_all(
                {"refused" if is_refused else "timeout": str(error)}
            )
            raise
        seed = secrets.randbits(31)
        coordinator.send_all({"go": coordinator.addresses, "seed": seed})
        admitted = coordinator.release()
        # The servers are closed on return, so TensorFlow can use the port.
        full_cluster = dataclasses.replace(
            cluster, addresses=tuple(coordinator.addresses)
        )
        return Rendezvous(full_cluster, admitted, seed)


class _Peer:
    """A connection to worker 0 and the state of its handshake."""

    def __init__(
        self, connection: Connection, address: tuple[Any, ...], is_local: bool
    ) -> None:
        self.connection = connection
        self.host = normalize_host(address[0])
        self.port = address[1]
        self.is_local = is_local  # on the host of worker 0
        self.deadline = time.monotonic() + waiting.TIMEOUT_S  # of the greeting
        self.greeting: Greeting | None = None
        self.session: Session | None = None
        self.is_admitted = False

    @property
    def process(self) -> str:
        """Random number of the peer's process; "" before its greeting."""
        return "" if self.greeting is None else self.greeting.process


class _Coordinator:
    """Handshakes of all peers with worker 0; a slow peer does not block."""

    def __init__(
        self,
        cluster: Cluster,
        secret: bytes,
        wait: Wait,
        selector: selectors.BaseSelector,
    ) -> None:
        self._cluster = cluster
        self._secret = secret
        self._wait = wait
        self._selector = selector
        self._admitted: dict[int, _Peer] = {}
        self._pending: dict[_Peer, None] = {}  # oldest first
        self._next_heartbeat = 0.0
        self._num_dropped = 0  # connections that were not admitted
        size = len(cluster.addresses)
        self._max_greeting_bytes = _GREETING_BYTES + _ADDRESS_BYTES * size
        self.addresses = list(cluster.addresses)

    def missing(self) -> list[int]:
        """Return the indices of the workers that are not admitted."""
        size = len(self._cluster.addresses)
        return [i for i in range(1, size) if i not in self._admitted]

    def send_all(self, message: Message) -> None:
        """Send a message to all admitted workers."""
        for peer in list(self._admitted.values()):
            peer.connection.send(message)

    def send_missing(self, missing: Sequence[int]) -> None:
        """Send the list of missing workers to admitted workers, at 1 Hz."""
        if time.monotonic() > self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + _HEARTBEAT_INTERVAL_S
            self.send_all({"missing": missing[: waiting.MAX_NAMED + 1]})

    def release(self) -> dict[int, Connection]:
        """Return the connections of admitted workers, which stay open."""
        connections = {i: peer.connection for i, peer in self._admitted.items()}
        for connection in connections.values():
            self._selector.unregister(connection)
            connection.max_message_bytes = MAX_MESSAGE_BYTES
        self._admitted.clear()
        return connections

    def close(self) -> None:
        """Close all connections that `release` has not returned."""
        for peer in (*self._admitted.values(), *self._pending):
            peer.connection.close()
        if self._num_dropped > _MAX_PRINTED:
            print_line(
                f"worker 0 has dropped {self._num_dropped} connections; the "
                f"first {_MAX_PRINTED} are printed."
            )

    def accept(self, server: Any) -> None:
        """Accept one connection; drop the oldest if there are too many."""
        try:
            sock, address = server.accept()
        except OSError as error:
            # Out of file descriptors: drop the oldest connection. Any other
            # error means that the new connection has already ended.
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._pending:
                self._drop(next(iter(self._pending)), "too many connections")
            return
        try:
            host, local_host = normalize_host(address[0]), sock.getsockname()[0]
            is_local = host == normalize_host(local_host) or is_loopback(host)
            limits = waiting.SHORT_TIMEOUT_S, self._max_greeting_bytes
            connection = Connection(sock, *limits)
        except OSError:
            sock.close()
            return
        peer = _Peer(connection, address, is_local)
        self._pending[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if len(self._pending) > _MAX_PENDING:
            self._drop(next(iter(self._pending)), "too many connections")

    def drop_expired(self) -> None:
        """Drop disconnected workers and handshakes past their deadline."""
        for peer in list(self._admitted.values()):
            if peer.connection.closed:
                self._drop(peer, "the connection has ended")
        now = time.monotonic()
        for peer in list(self._pending):
            if now < peer.deadline:
                break
            self._drop(peer, f"no greeting within {waiting.TIMEOUT_S:g} s")

    def receive(self, peer: _Peer) -> None:
        """Handle the messages of a peer; drop the peer if one is invalid."""
        if not self._is_open(peer):
            return  # dropped since the selector returned
        peer.connection.read()
        while (
            self._is_open(peer)
            and (line := peer.connection.pop_line()) is not None
        ):
            try:
                if peer.is_admitted:
                    raise ValueError("it has sent a message before the start")
                self._handle_handshake(peer, parse(line))
            except RefusedError:
                raise
            except ValueError as error:
                self._drop(peer, f"{error}: {quote(line)}")
        if peer.connection.closed and self._is_open(peer):
            self._drop(peer, self._disconnect_reason(peer))

    def _is_open(self, peer: _Peer) -> bool:
        return peer.is_admitted or peer in self._pending

    def _disconnect_reason(self, peer: _Peer) -> str:
        if peer.is_admitted:
            return "the connection has ended"
        if peer.session is not None:
            return (
                "it has ended the connection, as a worker does that has "
                f"another secret ({SECRET_VARIABLE}) or none"
            )
        return (
            "the connection ended, or had more than "
            f"{self._max_greeting_bytes} bytes, before a greeting was complete"
        )

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Close a connection; print the reason.

        The reasons of peers that were not admitted are printed `_MAX_PRINTED`
        times.

        The reasons of workers with a valid greeting are also in the timeout
        error.
        """
        self._pending.pop(peer, None)
        self._num_dropped += not peer.is_admitted
        is_printed = peer.is_admitted or self._num_dropped <= _MAX_PRINTED
        name = "a connection"
        if peer.greeting is not None:
            name = f"worker {peer.greeting.worker}"
            if self._admitted.get(peer.greeting.worker) is peer:
                del self._admitted[peer.greeting.worker]
        peer.is_admitted = False
        self._selector.unregister(peer.connection)
        peer.connection.close()
        description = f"{name} from {peer.host} port {peer.port}: {reason}"
        if peer.session is not None:
            self._wait.record(description)
        if is_printed:
            print_line(f"worker 0 has dropped {description}")

    def _handle_handshake(self, peer: _Peer, message: Message) -> None:
        """Answer a peer that is not admitted; raise a ValueError to drop it."""
        if peer.greeting is None or peer.session is None:
            peer.greeting = Greeting.read(message)
            nonce = make_nonce()
            peer.session = Session(self._secret, peer.greeting, nonce)
            proof = peer.session.prove(WORKER_0)
            peer.connection.send({"nonce": nonce, "proof": proof})
            return
        if not peer.session.verify(PEER, message.get("proof")):
            raise ValueError(
                f"it has another secret ({SECRET_VARIABLE}) or none"
            )
        if self._secret:
            keys = peer.session.key(WORKER_0), peer.session.key(PEER)
            peer.connection.enable_mac(*keys)
        if peer.greeting.knock:
            self._answer_probe(peer, peer.greeting)
        elif reason := self._reason_to_refuse(peer, peer.greeting):
            peer.connection.send({"refused": reason})
            self._drop(peer, reason)
        else:
            self._admit(peer, peer.greeting)

    def _admit(self, peer: _Peer, greeting: Greeting) -> None:
        if (older := self._admitted.get(greeting.worker)) is not None:
            self._drop(older, "the same process has connected again")
        del self._pending[peer]
        self._admitted[greeting.worker] = peer
        self.addresses[greeting.worker] = greeting.cluster[greeting.worker]
        peer.is_admitted = True
        peer.connection.send(
            {"missing": self.missing()[: waiting.MAX_NAMED + 1]}
        )

    def _reason_to_refuse(self, peer: _Peer, greeting: Greeting) -> str:
        """Return why worker 0 must refuse a worker; "" if it can take part."""
        index, received = greeting.worker, greeting.cluster
        expected, job = self._cluster.addresses, self._cluster.job
        if len(received) != len(expected) or any(
            a != b for a, b in zip(received, expected, strict=True) if a and b
        ):
            return (
                "All workers must have the same cluster. Received: "
                f"{_format_addresses(received)} on worker {index}, "
                f"{_format_addresses(expected)} on worker 0"
            )
        if job and greeting.job and job != greeting.job:
            return (
                "This process is of another job than "
                f"{self._cluster.name(0)}: {quote(greeting.job)} here, "
                f"{quote(job)} there. Each job needs an address of its own"
            )
        older = self._admitted.get(index)
        if older is not None and older.process != greeting.process:
            return (
                f"Two processes are {self._cluster.name(index)}: each needs "
                "an index of its own"
            )
        taken = [a for i, a in enumerate(self.addresses) if i != index]
        if received[index] in taken:
            return f"Another worker has the address {quote(received[index])}"
        if expected[index] or self._secret:
            return ""
        # Without a secret, accept only an address on the sender's host.
        host = split_address(received[index])[0]
        allowed_hosts = {normalize_host(host), host}
        if peer.host in allowed_hosts:
            return ""
        if peer.is_local and split_address(expected[0])[0] in allowed_hosts:
            return ""
        return (
            f"Worker 0 does not know the address {quote(received[index])} of "
            f"worker {index}, which connects from {peer.host}. Without a "
            f"secret ({SECRET_VARIABLE}) it must be the same host, or all "
            "workers must have all addresses"
        )

    def _answer_probe(self, peer: _Peer, greeting: Greeting) -> None:
        """Answer another worker 0 that cannot listen at the same port.

        Raise a RefusedError if the workers of both jobs cannot be
        distinguished: the secrets are equal or not set, and the jobs are equal
        or unknown. Only a process of this host can cause this error.
        """
        peer.connection.send({"waiting": self._cluster.job})
        self._drop(peer, "it is another worker 0 with the same address")
        job = self._cluster.job
        is_other_job = bool(job and greeting.job and job != greeting.job)
        if peer.is_local and not is_other_job:
            raise RefusedError(
                f"Two processes are {self._cluster.name(0)}, and their "
                "workers cannot be distinguished. Start worker 0 once for "
                "each job. Two jobs need two ports (argument `coordinator`, "
                f"`TF_CONFIG`) or two secrets ({SECRET_VARIABLE})."
            )


def _format_addresses(addresses: Sequence[str]) -> str:
    """Return the first addresses of a cluster in escaped form."""
    quoted = [quote(address) for address in addresses[: waiting.MAX_NAMED]]
    if len(addresses) > waiting.MAX_NAMED:
        quoted.append(f"... ({len(addresses)} in all)")
    return f"[{', '.join(quoted)}]"


@contextlib.contextmanager
def _listen(
    cluster: Cluster, secret: bytes, wait: Wait
) -> Iterator[list[socket.socket]]:
    """Listen at the port of worker 0, as soon as the port is free.

    If all known addresses are loopback addresses, listen only on the loopback
    interface.
    """
    deadline = time.monotonic() + wait.remaining(waiting.TIMEOUT_S)
    host, port = split_address(cluster.addresses[0])
    known_hosts = [split_address(a)[0] for a in cluster.addresses if a]
    hosts = [""]
    if all(map(is_loopback, known_hosts)):
        hosts = list(waiting.LOOPBACK) if host == "localhost" else [host]
    servers: list[socket.socket] = []
    while not servers:
        try:
            servers = _open_servers(hosts, port)
        except OSError as error:
            cause = error.strerror
            if error.errno == errno.EADDRINUSE:
                _probe_port(cluster, secret, hosts, port, wait)
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise RefusedError(
                    f"This process cannot be {cluster.name(0)}: {cause}. Is "
                    "another process of this machine worker 0, too, or has an "
                    "earlier job not ended?"
                ) from error
            time.sleep(wait.remaining(waiting.POLL_INTERVAL_S))
    if not secret and hosts == [""]:
        print_line(
            "the start of this job is not authenticated: any process that "
            f"reaches port {port} of this host can take part in it. Use "
            f"trusted networks only, or set {SECRET_VARIABLE} on all workers."
        )
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        yield servers


def _open_servers(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen at a port of each host; "" means all interfaces."""
    has_dual_stack = socket.has_dualstack_ipv6()
    servers: list[socket.socket] = []
    try:
        for host in hosts:
            is_v6 = ":" in host or (not host and has_dual_stack)
            try:
                server = socket.create_server(
                    (host, port),
                    family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                    dualstack_ipv6=has_dual_stack and not host,
                )
            except OSError as error:
                # Without IPv6, listen on "127.0.0.1" only, not on "::1".
                if servers and error.errno != errno.EADDRINUSE:
                    continue
                raise
            server.settimeout(0)
            servers.append(server)
    except OSError:
        for server in servers:
            server.close()
        raise
    return servers


def _probe_port(
    cluster: Cluster,
    secret: bytes,
    hosts: Sequence[str],
    port: int,
    wait: Wait,
) -> None:
    """Raise a RefusedError if a waiting worker 0 uses the port."""
    job, seconds = "an unknown job", wait.remaining(waiting.SHORT_TIMEOUT_S)
    for host in waiting.LOOPBACK if hosts == [""] else hosts:
        try:
            sock = socket.create_connection((host, port), seconds)
        except OSError:
            continue
        greeting = Greeting(
            0, cluster.addresses, cluster.job, make_nonce(), make_nonce(), True
        )
        with contextlib.closing(Connection(sock, seconds)) as connection:
            connection.send(dataclasses.asdict(greeting))
            answer = connection.receive(seconds) or {}
            nonce = answer.get("nonce")
            if not isinstance(nonce, str) or "proof" not in answer:
                continue
            session = Session(secret, greeting, nonce)
            if session.verify(WORKER_0, answer["proof"]):
                connection.send({"proof": session.prove(PEER)})
                if secret:
                    keys = session.key(PEER), session.key(WORKER_0)
                    connection.enable_mac(*keys)
                answer = connection.receive(seconds) or {}
                job = f"job {quote(str(answer.get('waiting') or 'unknown'))}"
        raise RefusedError(
            f"This process cannot be {cluster.name(0)}: worker 0 of {job} "
            "waits for its workers there. Start worker 0 once for each job. "
            "Two jobs need two ports (argument `coordinator`, `TF_CONFIG`)."
        )
