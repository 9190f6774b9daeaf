"""Invalid and slow peers of worker 0, and the secret of a job."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

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
from tfkfac.cluster.channel import Connection, parse
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
    end = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), LIMIT_S)
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def waiting_worker_0(
    addresses: Sequence[str], timeout: float = LIMIT_S
) -> Iterator[Workers]:
    """Run worker 0 in a thread; on exit, worker 1 must join in time."""
    workers = Workers()
    workers.join(addresses, 0, timeout=timeout)
    yield workers
    start = time.monotonic()
    workers.join(addresses, 1)
    assert workers.end() == {0: None, 1: None}
    assert time.monotonic() - start < SHORT_S


def lines_until(capsys: Any, text: str, count: int = 1) -> list[str]:
    """Wait for `count` lines on stderr that contain a text."""
    end, lines = time.monotonic() + LIMIT_S, []
    while len(lines) < count:
        assert time.monotonic() < end, lines
        time.sleep(0.01)
        new = capsys.readouterr().err.splitlines()
        lines += [line for line in new if text in line]
    return lines


# --------------------------------------------------------------- malformed text
def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


MALFORMED = {
    "HTTP": b"GET / HTTP/1.1\r",
    "binary": b"\xff\x00\x9f\x1b[31m",
    "deep nesting": b"[" * 60_000,
    "closed nesting": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "a number of many digits": b"1" * 5000,
    "not an object": b"[]",
    "null": b"null",
    "NaN": b'{"worker": NaN}',
    "infinity": b'{"worker": -Infinity}',
    "empty": b"{}",
    "an earlier version": encode({"worker": 1, "cluster": ["a:1", "b:2"]}),
    "more fields": encode(make_greeting() | {"more": 1}),
    "another worker 0": encode(make_greeting(0)),
    **{
        f"{name} {value!r}": encode(make_greeting(**{name: value}))
        for name, value in [
            *(("worker", x) for x in (-1, 2, 99, True, 1.0, "1", None, [1])),
            ("worker", 10**400),
            *(("cluster", x) for x in (None, "a:1", {}, [], ["a:1"])),
            ("cluster", ["a:1", 2]),
            ("cluster", ["a:1", None]),
            ("cluster", ["a:1", ""]),
            ("cluster", ["", "b:2"]),
            ("cluster", ["a:1", "b"]),
            ("cluster", ["a:1", "b:0"]),
            ("cluster", ["a:1", "b:65536"]),
            ("cluster", ["a:1", "http://b:1"]),
            ("cluster", ["a:1", "::1:2"]),
            ("cluster", ["a:1", "b\n:2"]),
            ("cluster", ["a:1", "b" * 300 + ":2"]),
            ("job", 1),
            ("process", None),
            ("nonce", []),
            ("knock", 1),
            ("knock", True),
        ]
    },
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_greeting_raises_value_error(name: str) -> None:
    with pytest.raises(ValueError):
        Greeting.read(parse(MALFORMED[name]))


def test_malformed_greetings_are_dropped_and_reported(
    addresses: Any, capsys: Any
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(waiting_worker_0(addresses))
        for text in MALFORMED.values():
            connect(addresses).sendall(text + b"\n")
        lines = lines_until(capsys, "worker 0 has dropped", len(MALFORMED))
    assert len(lines) == len(MALFORMED)
    for line in lines:
        assert line.startswith("tfkfac: worker 0 has dropped a connection")
        assert "from 127.0.0.1 port " in line
        assert line.isprintable() and len(line) < 300
    assert any(r"'\xff\x00\x9f\x1b[31m'" in line for line in lines)


def test_an_endless_line_is_dropped(addresses: Any, capsys: Any) -> None:
    with waiting_worker_0(addresses), connect(addresses) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(b"x" * 2**20)
        (line,) = lines_until(capsys, "dropped")
        assert "more than" in line


# ---------------------------------------------------------- peers that are slow
def drip(peers: Sequence[socket.socket], done: threading.Event) -> None:
    """Send a byte on each connection repeatedly."""
    while not done.wait(0.05):
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(b" ")


@pytest.mark.parametrize("is_dripping", [False, True])
def test_idle_connections_do_not_delay_the_start(
    addresses: Any, is_dripping: bool
) -> None:
    """`waiting_worker_0` limits the time of the rendezvous."""
    done = threading.Event()
    with contextlib.ExitStack() as stack, waiting_worker_0(addresses):
        peers = [connect(addresses) for _ in range(40)]
        for peer in peers:
            stack.enter_context(peer)
        if is_dripping:
            threading.Thread(target=drip, args=(peers, done)).start()
            stack.callback(done.set)
            time.sleep(0.2)


def test_a_greeting_has_a_deadline(
    addresses: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.5)
    done = threading.Event()
    with waiting_worker_0(addresses), connect(addresses) as peer:
        threading.Thread(target=drip, args=([peer], done)).start()
        lines = lines_until(capsys, "dropped")
        done.set()
    assert "no greeting within 0.5 s" in lines[0]


def test_slow_peers_do_not_extend_the_wait(addresses: Any) -> None:
    workers, done = Workers(), threading.Event()
    workers.join(addresses, 0, timeout=1.0)
    peers = [connect(addresses) for _ in range(3)]
    threading.Thread(target=drip, args=(peers, done)).start()
    assert isinstance(workers.wait_for(0, 2.0), TimeoutError)
    done.set()


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


def test_a_greeting_without_proof_is_not_admitted(addresses: Any) -> None:
    """The peer must also answer the nonce."""
    with waiting_worker_0(addresses):
        stranger = RawWorker(addresses)
    stranger.connection.close()


def test_without_a_secret_the_address_must_be_the_senders(
    addresses: Any,
) -> None:
    with waiting_worker_0(addresses):
        for elsewhere in ("10.66.66.66:666", "a.example:666"):
            stranger = RawWorker(addresses, known=(addresses[0], elsewhere))
            assert "must be the same host" in stranger.prove()["refused"]


def test_a_lost_worker_is_missing_again(addresses: Any, capsys: Any) -> None:
    """Its index is free for another process."""
    with waiting_worker_0((*addresses, "")[:2]):
        pass
    first = (addresses[0], "", "")
    workers = Workers()
    workers.join(first, 0)
    lost = RawWorker(first, known=(*first[:1], "127.0.0.1:9", ""))
    assert lost.prove() == {"missing": [2]}
    lost.connection.close()
    lines_until(capsys, "the connection has ended")
    workers.join(first, 1)
    time.sleep(0.2)
    assert not workers.results
    workers.join(first, 2)
    assert workers.end() == {0: None, 1: None, 2: None}


def test_a_process_can_connect_again(addresses: Any, capsys: Any) -> None:
    """Also before worker 0 detects the end of the old connection."""
    first = (addresses[0], "", "")
    workers = Workers()
    workers.join(first, 0)
    known = (addresses[0], "127.0.0.1:9", "")
    old = RawWorker(first, "same process", known)
    assert old.prove() == {"missing": [2]}
    new = RawWorker(first, "same process", known)
    assert new.prove() == {"missing": [2]}
    other = RawWorker(first, "another process", known)
    assert "Two processes are worker 1" in other.prove()["refused"]
    workers.join(first, 2)
    assert workers.end() == {0: None, 2: None}
    for peer in (old, new, other):
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


def test_a_message_before_the_start_drops_the_worker(
    addresses: Any, capsys: Any
) -> None:
    """It would be read as a message of the running job."""
    first = (addresses[0], "", "")
    workers = Workers()
    workers.join(first, 0, timeout=1.0)
    peer = RawWorker(first, known=(addresses[0], "127.0.0.1:9", ""))
    assert peer.prove() == {"missing": [2]}
    peer.connection.send({"stop": True})
    lines_until(capsys, "it has sent a message before the start")
    assert isinstance(workers.end()[0], TimeoutError)


@pytest.mark.parametrize("secret", ["", "secret"])
def test_the_connections_stay_open_for_the_job(
    addresses: Any, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long messages, and MACs if there is a secret."""
    monkeypatch.setenv("TFKFAC_SECRET", secret)
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        results[index] = wait_for_all(Cluster(addresses, index), LIMIT_S)

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    connections = results[0].connections[1], results[1].connections[0]
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
        time.sleep(0.2)
    printed = capsys.readouterr().err.splitlines()
    lines = [line for line in printed if "not authenticated" in line]
    assert len(lines) == (0 if secret else 1)
    assert all("TFKFAC_SECRET" in line for line in lines)


# ---------------------------------------------------------------------- secret
@pytest.fixture
def with_secret(monkeypatch: pytest.MonkeyPatch, addresses: Any) -> bytes:
    monkeypatch.setenv("TFKFAC_SECRET", "of this job")
    return b"of this job"


def test_workers_with_the_same_secret_start(
    addresses: Any, with_secret: bytes
) -> None:
    with waiting_worker_0(addresses):
        pass


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


def test_proofs_cannot_be_reused(addresses: Any, with_secret: bytes) -> None:
    """Reflection of worker 0's proof, and replay of an earlier proof."""
    with waiting_worker_0(addresses):
        worker = RawWorker(addresses)
        worker.connection.send({"proof": worker.answer["proof"]})
        assert (
            worker.connection.receive(LIMIT_S) is None
            and worker.connection.closed
        )
        earlier = RawWorker(addresses)
        proof = earlier.session(with_secret).prove(PEER)
        earlier.connection.close()
        worker = RawWorker(addresses)
        worker.connection.send({"proof": proof})
        assert (
            worker.connection.receive(LIMIT_S) is None
            and worker.connection.closed
        )


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


def connection_pair() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    return Connection(client, LIMIT_S), Connection(peer, LIMIT_S)


@pytest.mark.parametrize(
    "attack", ["none", "no MAC", "changed", "repeated", "reordered", "mirrored"]
)
def test_messages_carry_a_mac_with_a_counter(attack: str) -> None:
    """Any line except the sender's next message ends the connection."""
    sender, receiver = connection_pair()
    recorder, tap = connection_pair()
    recorder.enable_mac(b"key of one", b"key of the other")
    for number in range(2):
        recorder.send({"number": number})
    texts = []
    while len(texts) < 2:
        tap.read()
        while (text := tap.pop_line()) is not None:
            texts.append(text)
    first, second = texts
    is_mirrored = attack == "mirrored"
    keys = [b"key of the other", b"key of one"]
    receiver.enable_mac(*(reversed(keys) if is_mirrored else keys))
    sent = {
        "none": [first, second],
        "no MAC": [first.partition(b" ")[2]],
        "changed": [first.replace(b'"number": 0', b'"number": 5')],
        "repeated": [first, first],
        "reordered": [second],
        "mirrored": [first],
    }[attack]
    expected = {"none": 2, "repeated": 1}.get(attack, 0)
    sender._socket.sendall(b"".join(text + b"\n" for text in sent))
    received = [receiver.receive(LIMIT_S) for _ in sent]
    assert received[:expected] == [{"number": n} for n in range(expected)]
    assert received[expected:] == [None] * (len(sent) - expected)
    assert receiver.closed == (attack != "none")


@pytest.mark.parametrize(
    ("value", "secret"),
    [("", b""), ("  ", b""), ("word", b"word"), ("a/b", b"a/b")],
)
def test_the_value_of_the_secret(value: str, secret: bytes) -> None:
    assert read_secret({"TFKFAC_SECRET": value}) == secret
    assert read_secret({}) == b""


def test_the_file_of_the_secret(tmp_path: Any) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"word \xff\n")
    assert read_secret({"TFKFAC_SECRET": str(path)}) == b"word \xff"
    path.write_bytes(b"\n")
    for value in (path, tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="`TFKFAC_SECRET` must") as caught:
            read_secret({"TFKFAC_SECRET": str(value)})
        assert str(value) not in str(caught.value), "it may be a secret"
