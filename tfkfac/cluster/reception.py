"""Worker 0 at the rendezvous: it receives all other workers.

Any process can connect to the port of worker 0. A message that is no greeting
is reported, and its connection is dropped. A process with a valid greeting that
cannot take part, for example of another job, receives the reason and is
dropped. Neither case ends the start.
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
    FIRST,
    OTHER,
    VARIABLE,
    Greeting,
    Session,
    make_nonce,
)
from tfkfac.cluster.channel import LONGEST_LINE, Line, Message, parse
from tfkfac.cluster.config import Cluster, split_address
from tfkfac.cluster.waiting import (
    RefusedError,
    Rendezvous,
    Wait,
    is_loopback,
    plain,
    print_line,
    quote,
)

_HEARTBEAT = 1.0  # seconds between two messages "missing" to each worker
# Connections without a complete greeting; beyond this number the oldest is
# dropped. A worker needs one round trip for its greeting, and tries again if
# it is dropped. The number bounds memory and open files.
_MOST_PENDING = 256
# Bytes of a greeting: text, and the longest address for each worker.
_GREETING_BYTES, _ADDRESS_BYTES = 2**16, 300


def receive_all(cluster: Cluster, secret: bytes, wait: Wait) -> Rendezvous:
    """Wait for the other workers as worker 0; let them go on."""
    with (
        _listen(cluster, secret, wait) as servers,
        selectors.DefaultSelector() as selector,
        contextlib.ExitStack() as connections,
    ):
        reception = _Reception(cluster, secret, wait, selector)
        connections.callback(reception.close)
        for server in servers:
            selector.register(server, selectors.EVENT_READ)
        try:
            while missing := reception.missing():
                wait.check(missing)
                reception.tell_missing(missing)
                events = selector.select(wait.left(waiting.POLL_INTERVAL_S))
                peers = [key.data for key, _ in events if key.data is not None]
                # The end of an admitted connection comes before a greeting
                # that takes its place.
                for peer in sorted(peers, key=lambda p: not p.is_admitted):
                    reception.receive(peer)
                for key, _ in events:
                    if key.data is None:
                        reception.accept(key.fileobj)
                reception.drop_late()
        except (RefusedError, TimeoutError) as error:
            is_refused = isinstance(error, RefusedError)
            reception.send_all(
                {"refused" if is_refused else "timeout": str(error)}
            )
            raise
        seed = secrets.randbits(31)
        reception.send_all({"go": reception.addresses, "seed": seed})
        lines = reception.release()
        # The servers are closed on return, so TensorFlow can use the port.
        complete = dataclasses.replace(
            cluster, addresses=tuple(reception.addresses)
        )
        return Rendezvous(complete, lines, seed)


class _Peer:
    """A connection to worker 0, from its first byte."""

    def __init__(
        self, line: Line, address: tuple[Any, ...], is_local: bool
    ) -> None:
        self.line = line
        self.host = plain(address[0])
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


class _Reception:
    """Worker 0's side of all connections. No peer blocks the others.

    Attributes:
        addresses: Addresses of all workers, as far as they are known.
    """

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
        self._present: dict[int, _Peer] = {}
        self._pending: dict[_Peer, None] = {}  # the oldest comes first
        self._next_heartbeat = 0.0
        size = len(cluster.addresses)
        self._longest = _GREETING_BYTES + _ADDRESS_BYTES * size
        self.addresses = list(cluster.addresses)

    def missing(self) -> list[int]:
        """Return the indices of the workers that are not there."""
        size = len(self._cluster.addresses)
        return [i for i in range(1, size) if i not in self._present]

    def send_all(self, message: Message) -> None:
        """Send a message to all workers that are there."""
        for peer in list(self._present.values()):
            peer.line.send(message)

    def tell_missing(self, missing: Sequence[int]) -> None:
        """Send the missing workers to all admitted workers, once a second."""
        if time.monotonic() > self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + _HEARTBEAT
            self.send_all({"missing": missing[: waiting.MOST_NAMED + 1]})

    def release(self) -> dict[int, Line]:
        """Hand over the connections of all workers."""
        lines = {index: peer.line for index, peer in self._present.items()}
        for line in lines.values():
            self._selector.unregister(line)
            line.longest = LONGEST_LINE
        self._present.clear()
        return lines

    def close(self) -> None:
        """Close all connections that are left."""
        for peer in (*self._present.values(), *self._pending):
            peer.line.close()

    def accept(self, server: Any) -> None:
        """Accept one connection; drop the oldest if there are too many."""
        try:
            connection, address = server.accept()
        except OSError as error:
            # Else the connection has ended already.
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._pending:
                self._drop(next(iter(self._pending)), "too many connections")
            return
        try:
            host, here = plain(address[0]), connection.getsockname()[0]
            is_local = host == plain(here) or is_loopback(host)
            line = Line(connection, waiting.SHORT_TIMEOUT_S, self._longest)
        except OSError:
            connection.close()
            return
        peer = _Peer(line, address, is_local)
        self._pending[peer] = None
        self._selector.register(line, selectors.EVENT_READ, peer)
        if len(self._pending) > _MOST_PENDING:
            self._drop(next(iter(self._pending)), "too many connections")

    def drop_late(self) -> None:
        """Drop lost workers, and greetings that take too long."""
        for peer in list(self._present.values()):
            if peer.line.closed:
                self._drop(peer, "the connection has ended")
        now = time.monotonic()
        for peer in list(self._pending):
            if now < peer.deadline:
                break
            self._drop(peer, f"no greeting within {waiting.TIMEOUT_S:g} s")

    def receive(self, peer: _Peer) -> None:
        """Take what a peer has sent; drop the peer if that is not valid."""
        if not self._is_open(peer):
            return  # dropped after the selector returned it
        peer.line.read()
        while self._is_open(peer) and (text := peer.line.pop()) is not None:
            try:
                if peer.is_admitted:
                    raise ValueError("it has spoken before the start")
                self._take(peer, parse(text))
            except RefusedError:
                raise
            except ValueError as error:
                self._drop(peer, f"{error}: {quote(text)}")
        if peer.line.closed and self._is_open(peer):
            self._drop(peer, self._cause_of_end(peer))

    def _is_open(self, peer: _Peer) -> bool:
        return peer.is_admitted or peer in self._pending

    def _cause_of_end(self, peer: _Peer) -> str:
        if peer.is_admitted:
            return "the connection has ended"
        if peer.session is not None:
            return (
                "it has ended the connection, as a worker does that has "
                f"another secret ({VARIABLE}) or none"
            )
        return (
            "the connection ended, or had more than "
            f"{self._longest} bytes, before a greeting was complete"
        )

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Close a connection, and print why."""
        self._pending.pop(peer, None)
        name = "a connection"
        if peer.greeting is not None:
            name = f"worker {peer.greeting.worker}"
            if self._present.get(peer.greeting.worker) is peer:
                del self._present[peer.greeting.worker]
        peer.is_admitted = False
        self._selector.unregister(peer.line)
        peer.line.close()
        text = f"{name} from {peer.host} port {peer.port}: {reason}"
        if peer.session is not None:
            self._wait.record(text)
        print_line(f"worker 0 has dropped {text}")

    def _take(self, peer: _Peer, message: Message) -> None:
        """Take a message of a peer that is not admitted.

        Raises:
            ValueError: If the peer has to be dropped.
        """
        if peer.greeting is None or peer.session is None:
            peer.greeting = Greeting.read(message)
            nonce = make_nonce()
            peer.session = Session(self._secret, peer.greeting, nonce)
            proof = peer.session.prove(FIRST)
            peer.line.send({"nonce": nonce, "proof": proof})
            return
        if not peer.session.is_proved(OTHER, message.get("proof")):
            raise ValueError(f"it has another secret ({VARIABLE}) or none")
        if self._secret:
            keys = peer.session.key(FIRST), peer.session.key(OTHER)
            peer.line.protect(*keys)
        if peer.greeting.knock:
            self._answer_knock(peer, peer.greeting)
        elif reason := self._reason_to_refuse(peer, peer.greeting):
            peer.line.send({"refused": reason})
            self._drop(peer, reason)
        else:
            self._admit(peer, peer.greeting)

    def _admit(self, peer: _Peer, greeting: Greeting) -> None:
        if (older := self._present.get(greeting.worker)) is not None:
            self._drop(older, "the same process has connected again")
        del self._pending[peer]
        self._present[greeting.worker] = peer
        self.addresses[greeting.worker] = greeting.cluster[greeting.worker]
        peer.is_admitted = True
        peer.line.send({"missing": self.missing()[: waiting.MOST_NAMED + 1]})

    def _reason_to_refuse(self, peer: _Peer, greeting: Greeting) -> str:
        """Return why a worker cannot take part; "" if it can."""
        index, theirs = greeting.worker, greeting.cluster
        ours, job = self._cluster.addresses, self._cluster.job
        first = self._cluster.name(0)
        if len(theirs) != len(ours) or any(
            a != b for a, b in zip(theirs, ours, strict=True) if a and b
        ):
            return (
                "All workers must have the same cluster. Received: "
                f"{_addresses(theirs)} on worker {index}, "
                f"{_addresses(ours)} on worker 0"
            )
        if job and greeting.job and job != greeting.job:
            return (
                f"This process is of another job than {first}: "
                f"{quote(greeting.job)} here, {quote(job)} there. Each job "
                "needs an address of its own"
            )
        older = self._present.get(index)
        if older is not None and older.process != greeting.process:
            return (
                f"Two processes are {self._cluster.name(index)}: each needs "
                "an index of its own"
            )
        others = [a for i, a in enumerate(self.addresses) if i != index]
        if theirs[index] in others:
            return f"Another worker has the address {quote(theirs[index])}"
        if ours[index] or self._secret:
            return ""
        # The sender chooses this address: it must be where the sender is.
        host = split_address(theirs[index])[0]
        valid = {plain(host), host}
        if peer.host in valid:
            return ""
        if peer.is_local and split_address(ours[0])[0] in valid:
            return ""
        return (
            f"Worker 0 does not know the address {quote(theirs[index])} of "
            f"worker {index}, which connects from {peer.host}. Without a "
            f"secret ({VARIABLE}) it must be the same host, or all workers "
            "must have all addresses"
        )

    def _answer_knock(self, peer: _Peer, greeting: Greeting) -> None:
        """Answer another worker 0 that has found the port in use.

        Raises:
            RefusedError: If the workers of the other job cannot be told from
                those of this one: same secret or none, and same job or an
                unknown one. Only a process of this host can cause this.
        """
        peer.line.send({"waiting": self._cluster.job})
        self._drop(peer, "it is another worker 0 with the same address")
        job = self._cluster.job
        is_other = bool(job and greeting.job and job != greeting.job)
        if peer.is_local and not is_other:
            raise RefusedError(
                f"Two processes are {self._cluster.name(0)}, and their "
                "workers cannot be distinguished. Start worker 0 once for "
                "each job. Two jobs need two ports (argument `coordinator`, "
                f"`TF_CONFIG`) or two secrets ({VARIABLE})."
            )


def _addresses(addresses: Sequence[str]) -> str:
    """Return the first addresses of a cluster in escaped form."""
    quoted = [quote(address) for address in addresses[: waiting.MOST_NAMED]]
    if len(addresses) > waiting.MOST_NAMED:
        quoted.append(f"... ({len(addresses)} in all)")
    return f"[{', '.join(quoted)}]"


@contextlib.contextmanager
def _listen(
    cluster: Cluster, secret: bytes, wait: Wait
) -> Iterator[list[socket.socket]]:
    """Listen at the port of worker 0, once another process has left it.

    If all addresses are loopback addresses, listen at these only.

    Raises:
        RefusedError: If another process keeps the port.
    """
    end = time.monotonic() + wait.left(waiting.TIMEOUT_S)
    host, port = split_address(cluster.addresses[0])
    known = [split_address(a)[0] for a in cluster.addresses if a]
    hosts = [""]
    if all(map(is_loopback, known)):
        hosts = list(waiting.LOOPBACK) if host == "localhost" else [host]
    servers: list[socket.socket] = []
    while not servers:
        try:
            servers = _open_servers(hosts, port)
        except OSError as error:
            cause = error.strerror
            if error.errno == errno.EADDRINUSE:
                _knock(cluster, secret, hosts, port, wait)
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise RefusedError(
                    f"This process cannot be {cluster.name(0)}: {cause}. Is "
                    "another process of this machine worker 0, too, or has an "
                    "earlier job not ended?"
                ) from error
            time.sleep(wait.left(waiting.POLL_INTERVAL_S))
    if not secret and hosts == [""]:
        print_line(
            "the start of this job is not authenticated: any process that "
            f"reaches port {port} of this host can take part in it. Use "
            f"trusted networks only, or set {VARIABLE} on all workers."
        )
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        yield servers


def _open_servers(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen at a port of each host; "" is all interfaces."""
    dual = socket.has_dualstack_ipv6()
    servers: list[socket.socket] = []
    try:
        for host in hosts:
            is_v6 = ":" in host or (not host and dual)
            try:
                server = socket.create_server(
                    (host, port),
                    family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                    dualstack_ipv6=dual and not host,
                )
            except OSError as error:
                # "localhost" is one of two addresses where IPv6 is off.
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


def _knock(
    cluster: Cluster,
    secret: bytes,
    hosts: Sequence[str],
    port: int,
    wait: Wait,
) -> None:
    """Ask the process that has the port whether it is a waiting worker 0.

    Raises:
        RefusedError: If it is.
    """
    job, seconds = "an unknown job", wait.left(waiting.SHORT_TIMEOUT_S)
    for host in waiting.LOOPBACK if hosts == [""] else hosts:
        try:
            connection = socket.create_connection((host, port), seconds)
        except OSError:
            continue
        greeting = Greeting(
            0, cluster.addresses, cluster.job, make_nonce(), make_nonce(), True
        )
        with contextlib.closing(Line(connection, seconds)) as line:
            line.send(dataclasses.asdict(greeting))
            answer = line.receive(seconds) or {}
            nonce = answer.get("nonce")
            if not isinstance(nonce, str) or "proof" not in answer:
                continue
            session = Session(secret, greeting, nonce)
            if session.is_proved(FIRST, answer["proof"]):
                line.send({"proof": session.prove(OTHER)})
                if secret:
                    line.protect(session.key(OTHER), session.key(FIRST))
                answer = line.receive(seconds) or {}
                job = f"job {quote(str(answer.get('waiting') or 'unknown'))}"
        raise RefusedError(
            f"This process cannot be {cluster.name(0)}: worker 0 of {job} "
            "waits for its workers there. Start worker 0 once for each job. "
            "Two jobs need two ports (argument `coordinator`, `TF_CONFIG`)."
        )
