"""Invalid and slow peers of worker 0, and the secret of a job."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.test_channel import connection_pair, wait_until
from tests.cluster.test_rendezvous import LIMIT_S, SHORT_S, Workers
from tests.support.ports import address, claim_ports
from tfkfac.cluster import coordinator, waiting
from tfkfac.cluster.authentication import (
    PEER,
    WORKER_0,
    Greeting,
    Session,
    make_nonce,
    read_secret,
)
from tfkfac.cluster.channel import Connection
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.rendezvous import RefusedError, wait_for_all


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Addresses of two workers; worker 0 does not know that of worker 1."""
    monkeypatch.delenv("TFKFAC_SECRET", raising=False)
    with contextlib.closing(*claim_ports(1)) as port:
        yield address(port), ""


def make_greeting(index: int = 1, **changes: Any) -> dict[str, Any]:
    cluster = ("host0:1", "host1:2")
    greeting = Greeting(index, cluster, "", make_nonce(), make_nonce())
    return dataclasses.asdict(greeting) | changes


def connect(addresses: Sequence[str]) -> socket.socket:
    """Connect to worker 0, once it listens."""
    host, _, port = addresses[0].rpartition(":")

    def attempt() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), LIMIT_S)
        return None

    return wait_until(attempt)


@contextlib.contextmanager
def waiting_worker_0(addresses: Sequence[str]) -> Iterator[Workers]:
    """Run worker 0 in a thread; on exit, worker 1 must join in time."""
    workers = Workers()
    workers.join(addresses, 0)
    yield workers
    start = time.monotonic()
    workers.join(addresses, 1)
    assert workers.end() == {0: None, 1: None}
    assert time.monotonic() - start < SHORT_S


def lines_until(capsys: Any, text: str, count: int = 1) -> list[str]:
    """Wait for `count` lines on stderr that contain a text."""
    lines: list[str] = []

    def read() -> bool:
        new = capsys.readouterr().err.splitlines()
        lines.extend(line for line in new if text in line)
        return len(lines) >= count

    wait_until(read)
    return lines


# --------------------------------------------------------------- malformed text
def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


MALFORMED = [
    b"GET / HTTP/1.1\r",
    b"\xff\x00\x9f\x1b[31m",
    b"[" * 60_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b"1" * 5000,
    b"x" * 2**20,
    b"[]",
    b'{"worker": NaN}',
    b"{}",
    encode(make_greeting() | {"more": 1}),
    encode(make_greeting(0)),
    *(
        encode(make_greeting(**{name: value}))
        for name, value in [
            *(("worker", x) for x in (-1, 2, True, 1.0, "1", None, 10**400)),
            *(("cluster", x) for x in (None, "a:1", [], ["a:1"], ["a:1", 2])),
            ("cluster", ["a:1", ""]),
            ("cluster", ["", "b:2"]),
            ("cluster", ["a:1", "b\n:2"]),
            ("job", 1),
            ("process", None),
            ("nonce", []),
            ("knock", 1),
            ("knock", True),
        ]
    ),
]


def test_malformed_greetings_are_dropped_and_reported(
    addresses: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_MAX_PRINTED", len(MALFORMED))
    with waiting_worker_0(addresses):
        for text in MALFORMED:
            with contextlib.suppress(OSError):  # an endless line
                connect(addresses).sendall(text + b"\n")
        lines = lines_until(capsys, "worker 0 has dropped", len(MALFORMED))
    assert len(lines) == len(MALFORMED)
    for line in lines:
        assert "dropped a connection from 127.0.0.1 port " in line
        assert line.isprintable() and len(line) < 300
    assert any(r"'\xff\x00\x9f\x1b[31m'" in line for line in lines)
    assert sum("more than" in line for line in lines) == 1


# ---------------------------------------------------------- peers that are slow
@contextlib.contextmanager
def dripping(peers: Sequence[socket.socket]) -> Iterator[None]:
    """Send a byte on each connection repeatedly."""
    done = threading.Event()

    def drip() -> None:
        while not done.wait(0.05):
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.sendall(b" ")

    threading.Thread(target=drip).start()
    yield
    done.set()


def test_strangers_print_twenty_lines_and_a_count(
    addresses: Any, capsys: Any
) -> None:
    """Also of strangers that end the connection after a valid greeting."""
    with waiting_worker_0(addresses):
        for text in [b"x", encode(make_greeting())] * 25:
            with connect(addresses) as sock:
                sock.sendall(text + b"\n")
    lines = lines_until(capsys, "worker 0 has dropped", 21)
    assert len(lines) == 21
    assert lines[-1].endswith(" connections; the first 20 are printed.")


def test_slow_connections_do_not_delay_the_start(addresses: Any) -> None:
    """`waiting_worker_0` limits the time; half of the peers are silent."""
    with contextlib.ExitStack() as stack, waiting_worker_0(addresses):
        peers = [stack.enter_context(connect(addresses)) for _ in range(40)]
        stack.enter_context(dripping(peers[::2]))


def test_a_greeting_has_a_deadline(
    addresses: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.5)
    with (
        waiting_worker_0(addresses),
        connect(addresses) as peer,
        dripping([peer]),
    ):
        lines = lines_until(capsys, "dropped")
    assert "no greeting within 0.5 s" in lines[0]


def test_slow_peers_do_not_extend_the_wait(addresses: Any) -> None:
    workers = Workers()
    workers.join(addresses, 0, timeout=0.5)
    with dripping([connect(addresses) for _ in range(3)]):
        assert isinstance(workers.wait_for(0, 2.0), TimeoutError)


def test_beyond_the_limit_the_oldest_connection_is_dropped(
    addresses: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(coordinator, "_MAX_PENDING", 4)
    with contextlib.ExitStack() as stack, waiting_worker_0(addresses):
        peers = [stack.enter_context(connect(addresses)) for _ in range(10)]
        lines = lines_until(capsys, "too many connections", 6)
        ports = [peer.getsockname()[1] for peer in peers]
        for port, line in zip(ports, lines, strict=False):
            assert f"port {port}: " in line


# ------------------------------------------------------- peers with a greeting
class RawWorker:
    """Worker 1 that sends each message of the handshake separately."""

    def __init__(
        self,
        addresses: Sequence[str],
        process: str = "",
        known: Sequence[str] = (),
    ) -> None:
        connection = connect(addresses)
        address = f"127.0.0.1:{connection.getsockname()[1]}"
        self.connection = Connection(connection, LIMIT_S)
        known = tuple(known or (addresses[0], address))
        process = process or make_nonce()
        self.greeting = Greeting(1, known, "", process, make_nonce())
        self.connection.send(dataclasses.asdict(self.greeting))
        self.answer = self.connection.receive(LIMIT_S) or {}

    def session(self, secret: bytes = b"") -> Session:
        return Session(secret, self.greeting, self.answer["nonce"])

    def prove(self, secret: bytes = b"") -> Any:
        """Send the proof; return the answer of worker 0."""
        self.connection.send({"proof": self.session(secret).prove(PEER)})
        return self.connection.receive(LIMIT_S)


def test_without_a_secret_the_address_must_be_the_senders(
    addresses: Any,
) -> None:
    with waiting_worker_0(addresses):
        for elsewhere in ("10.66.66.66:666", "a.example:666"):
            stranger = RawWorker(addresses, known=(addresses[0], elsewhere))
            assert "must be the same host" in stranger.prove()["refused"]


def test_an_index_is_free_after_the_loss_of_its_worker(
    addresses: Any, capsys: Any
) -> None:
    """A process can connect again before worker 0 detects the loss."""
    first = (addresses[0], "", "")
    known = (addresses[0], "127.0.0.1:9", "")
    workers = Workers()
    workers.join(first, 0)
    peers = []
    for _ in range(2):
        peers.append(RawWorker(first, "same process", known))
        assert peers[-1].prove() == {"missing": [2]}
    other = RawWorker(first, "another process", known)
    assert "Two processes are worker 1" in other.prove()["refused"]
    # It would be read as a message of the running job.
    peers[-1].connection.send({"stop": True})
    lines_until(capsys, "it has sent a message before the start")
    lost = RawWorker(first, "another process", known)
    assert lost.prove() == {"missing": [2]}
    lost.connection.close()
    lines_until(capsys, "the connection has ended")
    for index in (1, 2):
        workers.join(first, index)
    assert workers.end() == {0: None, 1: None, 2: None}
    for peer in (*peers, other):
        peer.connection.close()


def test_a_worker_connects_again_after_a_disconnect(
    addresses: Any,
) -> None:
    """For example when worker 0 is restarted."""
    host, _, port = addresses[0].rpartition(":")
    workers = Workers()
    with socket.create_server((host, int(port))) as server:
        workers.join(addresses, 1)
        with contextlib.closing(
            Connection(server.accept()[0], LIMIT_S)
        ) as connection:
            greeting = Greeting.read(connection.receive(LIMIT_S) or {})
            session = Session(b"", greeting, "nonce")
            connection.send(
                {"nonce": "nonce", "proof": session.prove(WORKER_0)}
            )
            connection.receive(LIMIT_S)
            connection.send({"missing": [1]})
    workers.join(addresses, 0)
    assert workers.end() == {0: None, 1: None}


@pytest.mark.parametrize("secret", ["", "secret"])
def test_the_connections_stay_open_for_the_job(
    addresses: Any, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long messages, and MACs if there is a secret."""
    monkeypatch.setenv("TFKFAC_SECRET", secret)
    clusters = [Cluster(addresses, index) for index in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(wait_for_all, clusters, [LIMIT_S] * 2)
    connections = first.connections[1], second.connections[0]
    for sender, receiver in (connections, connections[::-1]):
        for number in range(2):
            message = {"number": number, "text": "x" * 200_000}
            sender.send(message)
            assert receiver.receive(LIMIT_S) == message
    connections[0]._socket.sendall(b"{}\n")
    assert connections[1].receive(LIMIT_S) == (None if secret else {})
    for connection in connections:
        connection.close()


def test_an_unproved_probe_does_not_end_the_start(addresses: Any) -> None:
    """Another worker 0 must answer the nonce."""
    with waiting_worker_0(addresses), connect(addresses) as peer:
        probe = Greeting(0, addresses, "", "p", "n", True)
        peer.sendall(encode(dataclasses.asdict(probe)) + b"\n")
        assert peer.recv(2**16)


# ------------------------------------------------------------------- addresses
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_addresses_use_only_the_loopback_interface(
    addresses: Any, host: str, capsys: Any
) -> None:
    known = addresses[0].replace("127.0.0.1", host), ""
    with waiting_worker_0(known):
        connect(addresses).close()
        elsewhere = ("127.0.0.2", int(known[0].rpartition(":")[2]))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(elsewhere, LIMIT_S)
    assert "not authenticated" not in capsys.readouterr().err


@pytest.mark.parametrize("secret", ["", "secret"])
def test_a_start_without_authentication_is_reported(
    addresses: Any,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Only if the addresses are not loopback addresses."""
    monkeypatch.setattr(coordinator, "is_loopback", lambda _: False)
    monkeypatch.setenv("TFKFAC_SECRET", secret)
    with waiting_worker_0(addresses):
        pass
    printed = capsys.readouterr().err
    assert ("not authenticated" in printed) == (not secret)


# ---------------------------------------------------------------------- secret
@pytest.fixture
def with_secret(monkeypatch: pytest.MonkeyPatch, addresses: Any) -> bytes:
    """The secret of worker 0 and of the worker 1 that starts."""
    monkeypatch.setenv("TFKFAC_SECRET", "of this job")
    return b"of this job"


@pytest.mark.parametrize("secret", [b"", b"of another job"])
def test_a_peer_without_the_secret_is_dropped(
    addresses: Any, with_secret: bytes, secret: bytes, capsys: Any
) -> None:
    with waiting_worker_0(addresses):
        stranger = RawWorker(addresses)
        session = stranger.session(with_secret)
        assert stranger.answer["proof"] == session.prove(WORKER_0)
        assert not stranger.session(secret).verify(
            WORKER_0, stranger.answer["proof"]
        )
        assert stranger.prove(secret) is None
        assert stranger.connection.closed
        (line,) = lines_until(capsys, "dropped worker 1")
        assert "another secret (TFKFAC_SECRET) or none" in line


@pytest.mark.parametrize("field", ["worker", "cluster", "job", "nonce"])
def test_a_proof_covers_the_whole_greeting(field: str) -> None:
    greeting = Greeting(1, ("a:1", "b:2", ""), "job", "process", "nonce")
    other = {"worker": 2, "cluster": ("a:1", "b:3", ""), "job": "", "nonce": ""}
    changed = dataclasses.replace(greeting, **{field: other[field]})
    proof = Session(b"secret", greeting, "their nonce").prove(PEER)
    assert Session(b"secret", greeting, "their nonce").verify(PEER, proof)
    assert not Session(b"secret", changed, "their nonce").verify(PEER, proof)
    assert not Session(b"secret", greeting, "").verify(PEER, proof)
    assert not Session(b"secret", greeting, "their nonce").verify(
        WORKER_0, proof
    )


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", ""), ("", "b")])
def test_a_worker_rejects_a_worker_0_without_the_secret(
    addresses: Any,
    ours: str,
    theirs: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """The worker raises at once; worker 0 prints its index."""
    monkeypatch.setenv("TFKFAC_SECRET", theirs)
    workers = Workers()
    workers.join(addresses, 0)
    connect(addresses).close()
    monkeypatch.setenv("TFKFAC_SECRET", ours)
    with pytest.raises(RefusedError, match="TFKFAC_SECRET must be the same"):
        wait_for_all(Cluster(addresses, 1), LIMIT_S)
    (line,) = lines_until(capsys, "dropped worker 1")
    assert "another secret (TFKFAC_SECRET) or none" in line
    monkeypatch.setenv("TFKFAC_SECRET", theirs)
    workers.join(addresses, 1)
    assert workers.end() == {0: None, 1: None}


ATTACKS: dict[str, Any] = {
    "none": lambda first, second: [first, second],
    "no MAC": lambda first, _: [first.partition(b" ")[2]],
    "changed": lambda first, _: [first.replace(b": 0", b": 5")],
    "repeated": lambda first, _: [first, first],
    "reordered": lambda _, second: [second],
    "mirrored": lambda first, _: [first],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_messages_carry_a_mac_with_a_counter(attack: str) -> None:
    """Any line except the sender's next message ends the connection."""
    sender, receiver = connection_pair()
    recorder, tap = connection_pair()
    keys = [b"key of a sender", b"key of its peer"]
    recorder.enable_mac(*keys)
    for number in range(2):
        recorder.send({"number": number})
    lines = tap._socket.makefile("rb")
    sent = ATTACKS[attack](lines.readline(), lines.readline())
    receiver.enable_mac(*(keys if attack == "mirrored" else keys[::-1]))
    sender._socket.sendall(b"".join(sent))
    received = [receiver.receive(LIMIT_S) for _ in sent]
    num_valid = {"none": 2, "repeated": 1}.get(attack, 0)
    expected = [{"number": n} if n < num_valid else None for n in range(2)]
    assert received == expected[: len(sent)]
    assert receiver.closed == (attack != "none")


def test_the_secret_is_a_word_or_in_a_file(tmp_path: Any) -> None:
    for value, secret in (("", b""), ("  ", b""), ("a/b", b"a/b")):
        assert read_secret({"TFKFAC_SECRET": value}) == secret
    assert read_secret({}) == b""
    path = tmp_path / "secret"
    path.write_bytes(b"word \xff\n")
    assert read_secret({"TFKFAC_SECRET": str(path)}) == b"word \xff"
    path.write_bytes(b"\n")
    for value in (path, tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="`TFKFAC_SECRET` must") as caught:
            read_secret({"TFKFAC_SECRET": str(value)})
        assert str(value) not in str(caught.value), "it may be a secret"
