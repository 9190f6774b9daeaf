"""Worker 0's side of the rendezvous: a gRPC server that all others call.

Each worker repeats its request until the reply is "go", "refused" or "timeout".
So a lost connection needs no treatment: a worker that stops calling is dropped.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence

import grpc

from tfkfac.cluster import waiting
from tfkfac.cluster.config import Cluster, split_address
from tfkfac.cluster.messages import (
    JOIN,
    PEER,
    SECRET_VARIABLE,
    SERVICE,
    WORKER_0,
    Greeting,
    Message,
    decode,
    encode,
    make_nonce,
)
from tfkfac.cluster.waiting import (
    RefusedError,
    Wait,
    is_loopback,
    normalize_host,
    print_line,
    quote,
)

_THREADS = 8  # server threads; each request takes about a millisecond
_MAX_PRINTED = 20  # lines on dropped processes that were not admitted
_END_TIMEOUT_S = 10.0  # time limit for the last reply to all workers


@dataclasses.dataclass
class _Peer:
    """A process that has joined as a worker."""

    greeting: Greeting
    description: str  # text for messages
    joined_s: float  # time of its first request
    time_s: float  # time of its last request
    rival: str = ""  # other process with the same index
    refused_rival: str = ""  # rival that came before the last request
    has_ended: bool = False  # True if it has received the last reply


class Coordinator:
    """Handler of the requests of all workers."""

    def __init__(self, cluster: Cluster, secret: bytes, wait: Wait) -> None:
        self._cluster = cluster
        self._secret = secret
        self._wait = wait
        self._session = make_nonce()
        self._changed = threading.Condition()
        self._peers: dict[int, _Peer] = {}
        self._failure = ""  # why no worker can start
        self._end: Message | None = None  # the last reply to all workers
        self._num_dropped = 0  # processes that were not admitted
        self.addresses = list(cluster.addresses)

    # ----------------------------------------------------- the main thread
    @contextlib.contextmanager
    def serve(self, probe: Callable[[], str]) -> Iterator[None]:
        """Serve at the port of worker 0, as soon as the port is free.

        `probe` returns the job of another worker 0 that uses the port, or "".
        """
        cluster, wait = self._cluster, self._wait
        deadline = time.monotonic() + wait.remaining(waiting.TIMEOUT_S)
        host, port = split_address(cluster.addresses[0])
        known_hosts = [split_address(a)[0] for a in cluster.addresses if a]
        is_open = not all(map(is_loopback, known_hosts))
        hosts = ["::"] if socket.has_dualstack_ipv6() else ["0.0.0.0"]
        if not is_open:
            hosts = ["127.0.0.1", "::1"] if host == "localhost" else [host]
        name = f"This process cannot be {cluster.name(0)}"
        while not (targets := _free_targets(name, hosts, port)):
            if job := probe():
                raise RefusedError(
                    f"{name}: worker 0 of job {quote(job)} waits for its "
                    "workers there. Start worker 0 once for each job. Two jobs "
                    "need two ports (argument `coordinator`, `TF_CONFIG`)."
                )
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"{name}: the port is in use. Is another process of this "
                    "machine worker 0, too, or has an earlier job not ended?"
                )
            time.sleep(wait.remaining(waiting.POLL_INTERVAL_S))
        handler = grpc.unary_unary_rpc_method_handler(self.join)
        service = grpc.method_handlers_generic_handler(SERVICE, {JOIN: handler})
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
            server = grpc.server(
                threads, handlers=[service], options=[("grpc.so_reuseport", 0)]
            )
            for target in targets:
                server.add_insecure_port(target)
            server.start()
            if is_open and not self._secret:
                print_line(
                    "the start of this job is not authenticated: any process "
                    f"that reaches port {port} of this host can take part in "
                    "it. Use trusted networks only, or set "
                    f"{SECRET_VARIABLE} on all workers."
                )
            try:
                yield
            finally:
                server.stop(_END_TIMEOUT_S).wait()

    def wait_for_all(self) -> None:
        """Wait until all workers have joined, and have called again since."""
        with self._changed:
            while missing := self._missing():
                if self._failure:
                    raise RefusedError(self._failure)
                self._wait.check(missing)
                interval_s = self._wait.remaining(waiting.POLL_INTERVAL_S)
                self._changed.wait(interval_s)
                limit = time.monotonic() - waiting.lease_s(len(self.addresses))
                for worker, peer in list(self._peers.items()):
                    if peer.time_s < limit:
                        del self._peers[worker]
                        self._drop(peer.description, "it has ended", True)

    def end(self, reply: Message) -> None:
        """Send the last reply to all workers that have joined."""
        with self._changed:
            self._end = reply
            peers = self._peers.values()
            self._changed.wait_for(
                lambda: all(peer.has_ended for peer in peers), _END_TIMEOUT_S
            )
            for peer in peers:
                if not peer.has_ended:
                    print_line(
                        f"{peer.description} has not asked for the end "
                        "of the start: it may have ended"
                    )
            if self._num_dropped > _MAX_PRINTED:
                print_line(
                    f"worker 0 has dropped {self._num_dropped} processes; the "
                    f"first {_MAX_PRINTED} are printed."
                )

    def _missing(self) -> list[int]:
        """Return the workers that have not joined."""
        workers = range(1, len(self.addresses))
        if missing := [i for i in workers if i not in self._peers]:
            return missing
        # Workers without a request since the last join may have ended.
        last = max(peer.joined_s for peer in self._peers.values())
        return [i for i in workers if self._peers[i].time_s <= last]

    def _drop(self, description: str, reason: str, is_worker: bool) -> None:
        """Print why a process is dropped; name workers in the timeout error."""
        self._num_dropped += not is_worker
        if is_worker:
            self._wait.record(f"{description}: {reason}")
        if is_worker or self._num_dropped <= _MAX_PRINTED:
            print_line(f"worker 0 has dropped {description}: {reason}")

    # ------------------------------------------------ threads of the server
    def join(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer the request of a worker."""
        # gRPC's name of a client is "ipv4:127.0.0.1:80" or "ipv6:%5B::1%5D:80".
        _, _, peer = urllib.parse.unquote(context.peer()).partition(":")
        host, _, port = peer.rpartition(":")
        host = normalize_host(host.strip("[]"))
        source = f"from {host} port {port}"
        try:
            content, is_authentic = decode(data, self._secret, PEER)
            greeting = Greeting.read(content)
        except ValueError as error:
            with self._changed:
                reason = f"{error}: {quote(data)}"
                self._drop(f"a process {source}", reason, False)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no greeting")
            raise AssertionError("`abort` raises") from error
        description = f"worker {greeting.worker} {source}"
        with self._changed:
            if not is_authentic:
                reason = f"it has another secret ({SECRET_VARIABLE}) or none"
                self._drop(description, reason, False)
                reply: Message = {"refused": reason}
            elif greeting.session != self._session:
                reply = {"session": self._session}
            elif greeting.worker == 0:
                # Another worker 0, which has found its port in use.
                job = self._cluster.job
                is_other_job = greeting.job not in (job, "") and bool(job)
                if _is_local(host) and not is_other_job:
                    self._failure = (
                        f"Two processes are {self._cluster.name(0)}, and their "
                        "workers cannot be distinguished. Start worker 0 once "
                        "for each job. Two jobs need two ports (argument "
                        "`coordinator`, `TF_CONFIG`) or two secrets "
                        f"({SECRET_VARIABLE})."
                    )
                reply = {"waiting": job or "unknown"}
            else:
                reply = self._admit(greeting, host, description)
            self._changed.notify_all()
        reply["nonce"] = greeting.nonce
        return encode(reply, self._secret, WORKER_0)

    def _admit(
        self, greeting: Greeting, host: str, description: str
    ) -> Message:
        """Register a worker, or refuse it; return the reply."""
        worker, now = greeting.worker, time.monotonic()
        # A loopback address is not unique: use the host of worker 0 instead.
        own_host = split_address(self._cluster.addresses[0])[0]
        sender = own_host if _is_local(host) else host
        address = greeting.cluster[worker]
        if not address:
            sender_host = f"[{sender}]" if ":" in sender else sender
            address = f"{sender_host}:{greeting.port}"
        reason = self._reason_to_refuse(greeting, address, host, sender)
        peer = self._peers.get(worker)
        if not reason and peer is not None:
            if peer.greeting.process == greeting.process:
                peer.refused_rival = peer.rival
            elif peer.refused_rival == greeting.process:
                name = self._cluster.name(worker)
                reason = f"Two processes are {name}: each needs its own index"
            else:
                # The registered process may have ended. Its next request, or
                # the lack of it, decides.
                peer.rival = greeting.process
                return {"missing": [worker]}
        if reason:
            self._drop(description, reason, True)
            return {"refused": reason}
        if peer is None:
            if self._end is not None:
                return self._end.copy()
            peer = self._peers[worker] = _Peer(greeting, description, now, now)
            self.addresses[worker] = address
        peer.time_s = now
        if self._end is not None:
            peer.has_ended = True
            return self._end.copy()
        return {"missing": self._missing()[: waiting.MAX_NAMED + 1]}

    def _reason_to_refuse(
        self, greeting: Greeting, address: str, host: str, sender: str
    ) -> str:
        """Return why worker 0 must refuse a worker; "" if it can take part.

        `host` is the IP address of the worker, `sender` the name or address by
        which other workers reach the worker.
        """
        worker, received = greeting.worker, greeting.cluster
        expected, job = self._cluster.addresses, self._cluster.job
        if len(received) != len(expected) or any(
            a != b for a, b in zip(received, expected, strict=True) if a and b
        ):
            return (
                "All workers must have the same cluster. Received: "
                f"{_format_addresses(received)} on worker {worker}, "
                f"{_format_addresses(expected)} on worker 0"
            )
        if job and greeting.job and job != greeting.job:
            return (
                "This process is of another job than "
                f"{self._cluster.name(0)}: {quote(greeting.job)} here, "
                f"{quote(job)} there. Each job needs an address of its own"
            )
        others = [a for i, a in enumerate(self.addresses) if i != worker]
        if address in others:
            return f"Another worker has the address {quote(address)}"
        # Without a secret, accept only an address on the sender's host.
        is_known = bool(expected[worker] or self._secret)
        named_host = normalize_host(split_address(address)[0])
        if is_known or named_host in (host, normalize_host(sender)):
            return ""
        return (
            f"Worker 0 does not know the address {quote(address)} of worker "
            f"{worker}, which connects from {host}. Without a secret "
            f"({SECRET_VARIABLE}) it must be the same host, or all workers "
            "must have all addresses"
        )


def _is_local(host: str) -> bool:
    """Return True if an IP address is one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock, contextlib.suppress(OSError):
        sock.bind((host, 0))
        return True
    return False


def _format_addresses(addresses: Sequence[str]) -> str:
    """Return the first addresses of a cluster in escaped form."""
    quoted = [quote(address) for address in addresses[: waiting.MAX_NAMED]]
    if len(addresses) > waiting.MAX_NAMED:
        quoted.append(f"... ({len(addresses)} in all)")
    return f"[{', '.join(quoted)}]"


def _free_targets(name: str, hosts: Sequence[str], port: int) -> list[str]:
    """Return gRPC's targets of a port on each host; [] if it is in use."""
    targets: list[str] = []
    errors: list[OSError] = []
    for host in hosts:
        is_v6 = ":" in host
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        try:
            socket.create_server(
                (host, port), family=family, dualstack_ipv6=host == "::"
            ).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return []
            errors.append(error)
        else:
            targets.append(f"[{host}]:{port}" if is_v6 else f"{host}:{port}")
    if not targets:
        raise RefusedError(f"{name}: {errors[0].strerror}") from errors[0]
    return targets
