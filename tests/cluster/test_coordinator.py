"""Peers of worker 0 that are no workers, and the secret of a job."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.cluster.test_rendezvous import LIMIT, SOON, Meeting
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
    """Addresses of two workers, the second of which only worker 1 knows."""
    monkeypatch.delenv("TFKFAC_SECRET", raising=False)
    with contextlib.closing(*claim_ports(1)) as port:
        yield address(port), ""


def greeting_of(index: int = 1, **changes: Any) -> dict[str, Any]:
    cluster = ("host0:1", "host1:2")
    greeting = Greeting(index, cluster, "", make_nonce(), make_nonce())
    return dataclasses.asdict(greeting) | changes


def connect(addresses: Sequence[str]) -> socket.socket:
    """Connect to worker 0 as soon as it listens."""
    host, _, port = addresses[0].rpartition(":")
    end = time.monotonic() + LIMIT
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), LIMIT)
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def waiting_worker_0(
    addresses: Sequence[str], timeout: float = LIMIT
) -> Iterator[Meeting]:
    """Worker 0 in a thread; it meets worker 1 in the end."""
    meeting = Meeting()
    meeting.join(addresses, 0, timeout=timeout)
    yield meeting
    start = time.monotonic()
    meeting.join(addresses, 1)
    assert meeting.end() == {0: None, 1: None}
    assert time.monotonic() - start < SOON


def lines_until(capsys: Any, text: str, count: int = 1) -> list[str]:
    """Return the lines on stderr with a text, when so many have come."""
    end, lines = time.monotonic() + LIMIT, []
    while len(lines) < count:
        assert time.monotonic() < end, lines
        time.sleep(0.01)
        said = capsys.readouterr().err.splitlines()
        lines += [line for line in said if text in line]
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
    "more fields": encode(greeting_of() | {"more": 1}),
    "another worker 0": encode(greeting_of(0)),
    **{
        f"{name} {value!r}": encode(greeting_of(**{name: value}))
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
def test_a_malformed_greeting_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(ValueError):
        Greeting.read(parse(MALFORMED[name]))


def test_strangers_are_dropped_and_reported(
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


def test_a_line_without_an_end_is_dropped(addresses: Any, capsys: Any) -> None:
    with waiting_worker_0(addresses), connect(addresses) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(b"x" * 2**20)
        (line,) = lines_until(capsys, "dropped")
        assert "more than" in line


# ---------------------------------------------------------- peers that are slow
def drip(peers: Sequence[socket.socket], done: threading.Event) -> None:
    """Send a byte on each connection again and again."""
    while not done.wait(0.05):
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(b" ")


@pytest.mark.parametrize("is_dripping", [False, True])
def test_idle_connections_delay_nobody(
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


def test_a_greeting_has_one_deadline(
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
    meeting, done = Meeting(), threading.Event()
    meeting.join(addresses, 0, timeout=1.0)
    peers = [connect(addresses) for _ in range(3)]
    threading.Thread(target=drip, args=(peers, done)).start()
    assert isinstance(meeting.wait_for(0, 2.0), TimeoutError)
    done.set()


def test_the_oldest_of_too_many_is_dropped(
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
    """Worker 1 by hand, up to any message of its greeting."""

    def __init__(
        self,
        addresses: Sequence[str],
        process: str = "",
        known: Sequence[str] = (),
    ) -> None:
        connection = connect(addresses)
        here = f"127.0.0.1:{connection.getsockname()[1]}"
        self.connection = Connection(connection, LIMIT)
        known = tuple(known or (addresses[0], here))
        process = process or make_nonce()
        self.greeting = Greeting(1, known, "", process, make_nonce())
        self.connection.send(dataclasses.asdict(self.greeting))
        self.answer = self.connection.receive(LIMIT) or {}

    def session(self, secret: bytes = b"") -> Session:
        return Session(secret, self.greeting, self.answer["nonce"])

    def prove(self, secret: bytes = b"") -> Any:
        """Send the proof; return what worker 0 says then."""
        self.connection.send({"proof": self.session(secret).prove(PEER)})
        return self.connection.receive(LIMIT)


def test_one_line_takes_nobodys_place(addresses: Any) -> None:
    """A valid greeting alone is not enough: the nonce must be answered."""
    with waiting_worker_0(addresses):
        stranger = RawWorker(addresses)
    stranger.connection.close()


def test_a_worker_says_only_an_address_where_it_is(addresses: Any) -> None:
    with waiting_worker_0(addresses):
        for elsewhere in ("10.66.66.66:666", "a.example:666"):
            stranger = RawWorker(addresses, known=(addresses[0], elsewhere))
            assert "must be the same host" in stranger.prove()["refused"]


def test_a_lost_worker_does_not_count(addresses: Any, capsys: Any) -> None:
    """It was there, and is gone before another process is worker 1."""
    with waiting_worker_0((*addresses, "")[:2]):
        pass
    first = (addresses[0], "", "")
    meeting = Meeting()
    meeting.join(first, 0)
    lost = RawWorker(first, known=(*first[:1], "127.0.0.1:9", ""))
    assert lost.prove() == {"missing": [2]}
    lost.connection.close()
    lines_until(capsys, "the connection has ended")
    meeting.join(first, 1)
    time.sleep(0.2)
    assert not meeting.results
    meeting.join(first, 2)
    assert meeting.end() == {0: None, 1: None, 2: None}


def test_a_process_connects_again_in_its_place(
    addresses: Any, capsys: Any
) -> None:
    """As after a connection that has ended on its side alone."""
    first = (addresses[0], "", "")
    meeting = Meeting()
    meeting.join(first, 0)
    known = (addresses[0], "127.0.0.1:9", "")
    old = RawWorker(first, "same process", known)
    assert old.prove() == {"missing": [2]}
    new = RawWorker(first, "same process", known)
    assert new.prove() == {"missing": [2]}
    other = RawWorker(first, "another process", known)
    assert "Two processes are worker 1" in other.prove()["refused"]
    meeting.join(first, 2)
    assert meeting.end() == {0: None, 2: None}
    for peer in (old, new, other):
        peer.connection.close()


def test_a_worker_connects_again_when_its_connection_breaks(
    addresses: Any,
) -> None:
    """As where worker 0 is started again."""
    host, _, port = addresses[0].rpartition(":")
    meeting = Meeting()
    with socket.create_server((host, int(port))) as server:
        meeting.join(addresses, 1)
        with contextlib.closing(Connection(server.accept()[0], LIMIT)) as line:
            greeting = Greeting.read(line.receive(LIMIT) or {})
            session = Session(b"", greeting, "nonce")
            line.send({"nonce": "nonce", "proof": session.prove(WORKER_0)})
            line.receive(LIMIT)
            line.send({"missing": [1]})
    meeting.join(addresses, 0)
    assert meeting.end() == {0: None, 1: None}


def test_a_worker_that_speaks_before_the_start_is_dropped(
    addresses: Any, capsys: Any
) -> None:
    """Its message would be one of the running job."""
    first = (addresses[0], "", "")
    meeting = Meeting()
    meeting.join(first, 0, timeout=1.0)
    peer = RawWorker(first, known=(addresses[0], "127.0.0.1:9", ""))
    assert peer.prove() == {"missing": [2]}
    peer.connection.send({"stop": True})
    lines_until(capsys, "it has sent a message before the start")
    assert isinstance(meeting.end()[0], TimeoutError)


@pytest.mark.parametrize("secret", ["", "secret"])
def test_the_connections_serve_the_running_job(
    addresses: Any, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long lines, and MACs if there is a secret."""
    monkeypatch.setenv("TFKFAC_SECRET", secret)
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        results[index] = wait_for_all(Cluster(addresses, index), LIMIT)

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    lines = results[0].connections[1], results[1].connections[0]
    for sender, receiver in (lines, lines[::-1]):
        for number in range(2):
            message = {"number": number, "text": "x" * 200_000}
            sender.send(message)
            assert receiver.receive(LIMIT) == message
    lines[0]._socket.sendall(b"{}\n")
    assert lines[1].receive(LIMIT) == (None if secret else {})
    for line in lines:
        line.close()


def test_a_stray_line_of_another_worker_0_ends_nothing(addresses: Any) -> None:
    """A knock counts only when worker 0's nonce is answered."""
    with waiting_worker_0(addresses), connect(addresses) as peer:
        knock = Greeting(0, addresses, "", "p", "n", True)
        peer.sendall(encode(dataclasses.asdict(knock)) + b"\n")
        assert peer.recv(2**16)


# ------------------------------------------------------------------- addresses
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_addresses_need_no_other_interface(
    addresses: Any, host: str, capsys: Any
) -> None:
    known = addresses[0].replace("127.0.0.1", host), ""
    with waiting_worker_0(known):
        connect(addresses).close()
        elsewhere = ("127.0.0.2", int(known[0].rpartition(":")[2]))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(elsewhere, LIMIT)
    assert "not authenticated" not in capsys.readouterr().err


@pytest.mark.parametrize("secret", ["", "secret"])
def test_an_open_start_is_said(
    addresses: Any,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Where the addresses are not of the loopback interface."""
    monkeypatch.setattr(coordinator, "is_loopback", lambda _: False)
    monkeypatch.setenv("TFKFAC_SECRET", secret)
    with waiting_worker_0(addresses):
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "not authenticated" in line]
    assert len(lines) == (0 if secret else 1)
    assert all("TFKFAC_SECRET" in line for line in lines)


# ---------------------------------------------------------------------- secret
@pytest.fixture
def with_secret(monkeypatch: pytest.MonkeyPatch, addresses: Any) -> bytes:
    monkeypatch.setenv("TFKFAC_SECRET", "of this job")
    return b"of this job"


def test_workers_with_one_secret_meet(
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


def test_proofs_cannot_be_used_again(
    addresses: Any, with_secret: bytes
) -> None:
    """Neither that of worker 0 (reflection) nor an earlier one (replay)."""
    with waiting_worker_0(addresses):
        worker = RawWorker(addresses)
        worker.connection.send({"proof": worker.answer["proof"]})
        assert (
            worker.connection.receive(LIMIT) is None
            and worker.connection.closed
        )
        earlier = RawWorker(addresses)
        proof = earlier.session(with_secret).prove(PEER)
        earlier.connection.close()
        worker = RawWorker(addresses)
        worker.connection.send({"proof": proof})
        assert (
            worker.connection.receive(LIMIT) is None
            and worker.connection.closed
        )


@pytest.mark.parametrize("field", ["worker", "cluster", "job", "nonce"])
def test_a_proof_is_of_the_whole_greeting(field: str) -> None:
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
def test_a_worker_does_not_go_on_without_the_proof_of_worker_0(
    addresses: Any,
    ours: str,
    theirs: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """It raises at once; worker 0 says which worker that was."""
    monkeypatch.setenv("TFKFAC_SECRET", theirs)
    meeting = Meeting()
    meeting.join(addresses, 0)
    connect(addresses).close()
    monkeypatch.setenv("TFKFAC_SECRET", ours)
    with pytest.raises(RefusedError, match="TFKFAC_SECRET must be the same"):
        wait_for_all(Cluster(addresses, 1), LIMIT)
    (line,) = lines_until(capsys, "dropped worker 1")
    assert "another secret (TFKFAC_SECRET) or none" in line
    monkeypatch.setenv("TFKFAC_SECRET", theirs)
    meeting.join(addresses, 1)
    assert meeting.end() == {0: None, 1: None}


def lines_with_keys() -> tuple[Connection, Connection]:

    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return Connection(one, LIMIT), Connection(other, LIMIT)


@pytest.mark.parametrize(
    "attack", ["none", "no MAC", "changed", "repeated", "reordered", "mirrored"]
)
def test_messages_carry_a_mac_with_a_counter(attack: str) -> None:
    """A line that is not the next one of the sender ends the connection."""
    sender, receiver = lines_with_keys()
    recorder, tap = lines_with_keys()
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
    received = [receiver.receive(LIMIT) for _ in sent]
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
