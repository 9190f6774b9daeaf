"""Rendezvous of the workers before TensorFlow starts."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

import tfkfac
from tests.support.ports import address, claim_ports
from tests.support.programs import wait
from tfkfac.cluster import coordinator, rendezvous, waiting
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.messages import (
    METHOD,
    PEER,
    WORKER_0,
    Greeting,
    decode,
    encode,
    read_secret,
)
from tfkfac.cluster.rendezvous import RefusedError, wait_for_all

LIMIT_S = 30.0


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("TFKFAC_SECRET", raising=False)
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(port) for port in claim_ports(3)]
        yield tuple(address(port) for port in ports)


class Workers:
    """Threads that call `wait_for_all` like the processes of a job."""

    def __init__(self) -> None:
        self.results: dict[Any, BaseException | None] = {}
        self.clusters: set[tuple[str, ...]] = set()
        self.seeds: set[int | None] = set()
        self._threads: list[threading.Thread] = []

    def join(
        self,
        addresses: Sequence[str],
        index: int,
        name: Any = None,
        timeout: float = LIMIT_S,
        job: str = "",
    ) -> None:
        def run() -> None:
            try:
                cluster = Cluster(tuple(addresses), index, job)
                complete, seed = wait_for_all(cluster, timeout)
                self.clusters.add(complete.addresses)
                self.seeds.add(seed)
                result = None
            except (TimeoutError, ValueError) as error:
                result = error
            self.results[index if name is None else name] = result

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def wait_for(self, name: Any) -> Any:
        """Return the result of one worker, while others still wait."""
        wait(lambda: name in self.results, LIMIT_S)
        return self.results[name]

    def end(self) -> dict[Any, BaseException | None]:
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert len(self.results) == len(self._threads)
        return self.results


def port_of(known: Sequence[str]) -> int:
    return int(known[0].rpartition(":")[2])


def wait_for_server(known: Sequence[str]) -> None:
    """Wait until worker 0 listens."""

    def connect() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port_of(known))).close()
            return True
        return False

    wait(connect, LIMIT_S)


# ------------------------------------------------------------------- the start
def test_all_workers_start_when_all_have_called(addresses: Any) -> None:
    """With one seed, which is new for each job."""
    seeds = set()
    for order in ((0, 1, 2), (2, 1, 0)):
        workers = Workers()
        for index in order[:-1]:
            workers.join(addresses, index)
        time.sleep(0.3)
        assert not workers.results, "two of three workers started"
        workers.join(addresses, order[-1])
        assert workers.end() == {0: None, 1: None, 2: None}
        # The port is free for TensorFlow's server.
        with socket.create_server(("", port_of(addresses))):
            pass
        (seed,) = workers.seeds
        assert seed is not None and 0 <= seed < 2**31
        seeds.add(seed)
    assert len(seeds) == 2
    _, seed = wait_for_all(Cluster(addresses[:1], 0), None)
    assert seed is None


@pytest.mark.parametrize(
    ("host", "count"), [("127.0.0.1", 32), ("[::1]", 3), ("localhost", 3)]
)
def test_only_the_address_of_worker_0_is_required(
    host: str, count: int
) -> None:
    """All workers receive the same addresses, with free ports."""
    with contextlib.closing(*claim_ports(1)) as claim:
        first = f"{host}:{claim.getsockname()[1]}"
        workers = Workers()
        for index in (2, 0, 1, *range(3, count)):
            workers.join((first, *[""] * (count - 1)), index)
        assert workers.end() == dict.fromkeys(range(count))
    (addresses,) = workers.clusters
    assert addresses[0] == first
    assert len(set(addresses)) == count
    for other in addresses[1:]:
        assert other.rpartition(":")[0] == host
        with socket.create_server(("", port_of([other]))):
            pass


@pytest.mark.parametrize(
    ("host", "secret"),
    [("127.0.0.1", ""), ("all", ""), ("all", "secret")],
)
def test_interfaces(
    addresses: Any,
    host: str,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Loopback addresses use only the loopback interface.

    On all interfaces without a secret, a line says so.
    """
    monkeypatch.setenv("TFKFAC_SECRET", secret)
    known = addresses[0].replace("127.0.0.1", host), ""
    if host == "all":
        known = addresses[:2]
        monkeypatch.setattr(coordinator, "is_loopback", lambda _: False)
    workers = Workers()
    workers.join(known, 0)
    wait_for_server(addresses)
    if host != "all":
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port_of(known)))
    workers.join(known, 1)
    assert workers.end() == {0: None, 1: None}
    printed = capsys.readouterr().err
    assert ("not authenticated" in printed) == ((host, secret) == ("all", ""))


# --------------------------------------------------- missing and wrong workers
def test_the_timeout_names_missing_and_dropped_workers(
    addresses: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A reminder before it, too."""
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.5)
    workers = Workers()
    workers.join(addresses, 0, timeout=1.0)
    workers.join(addresses, 2)
    workers.join(addresses[:2], 1)
    results = workers.end()
    assert isinstance(results.pop(1), RefusedError)
    for error in results.values():
        assert isinstance(error, TimeoutError)
        assert f"for worker 1 at {addresses[1]}" in str(error)
        assert "Dropped: worker 1 from 127.0.0.1" in str(error)
        assert "worker 2 at" not in str(error)
    reminder = f"worker 0 is waiting for worker 1 at {addresses[1]}"
    assert reminder in capsys.readouterr().err


def test_a_worker_with_wrong_settings_is_refused_at_once(
    addresses: Any, capsys: Any
) -> None:
    """The refused worker receives the reason; the others start."""
    workers = Workers()
    for index in (0, 1):
        workers.join(addresses, index, job="job 7")
    time.sleep(0.3)
    refused: dict[str, tuple[Any, ...]] = {
        "Two processes are worker 1 at": (addresses, 1, "index"),
        "must have the same cluster.": (addresses[:2], 1, "cluster"),
        "'job 8' here, 'job 7' there": (addresses, 2, "job", LIMIT_S, "job 8"),
    }
    for words, arguments in refused.items():
        workers.join(*arguments)
        error = workers.wait_for(arguments[2])
        assert isinstance(error, RefusedError)
        assert words in str(error)
    assert len(workers.results) == 3
    workers.join(addresses, 2)
    results = workers.end()
    assert [results[index] for index in range(3)] == [None] * 3
    lines = capsys.readouterr().err.splitlines()
    for words, line in zip(refused, lines, strict=True):
        assert line.startswith("tfkfac: worker 0 has dropped worker ")
        assert words in line


@pytest.mark.parametrize(
    ("jobs", "first_fails"),
    [(("", ""), True), (("A", "A"), True), (("A", "B"), False)],
)
def test_two_jobs_with_one_port(
    addresses: Any, jobs: Any, first_fails: bool
) -> None:
    """Workers of known jobs never mix; unknown jobs are refused."""
    known = (addresses[0], "")
    workers = Workers()
    workers.join(known, 0, "A0", job=jobs[0])
    wait_for_server(known)
    workers.join(known, 0, "B0", job=jobs[1])
    assert "Two jobs need two ports" in str(workers.wait_for("B0"))
    if first_fails:
        assert "Two processes are worker 0" in str(workers.wait_for("A0"))
        return
    workers.join(known, 1, "B1", job=jobs[1])
    assert "is of another job" in str(workers.wait_for("B1"))
    workers.join(known, 1, "A1", job=jobs[0])
    results = workers.end()
    assert results["A0"] is None and results["A1"] is None


def test_another_program_uses_the_port_of_worker_0(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.2)
    with (
        socket.create_server(("", port_of(addresses))),
        pytest.raises(RefusedError, match="cannot be worker 0 at"),
    ):
        wait_for_all(Cluster(addresses, 0), LIMIT_S)


# -------------------------------------------------- requests of other programs
def greeting(known: Sequence[str], **changes: Any) -> Greeting:
    first = Greeting(1, tuple(known), 9, "", "process", "", "nonce")
    return dataclasses.replace(first, **changes)


def call(known: Sequence[str], data: bytes, method: str = METHOD) -> bytes:
    """Send a request to worker 0; raise a `grpc.RpcError` if it is dropped."""
    with grpc.insecure_channel(f"127.0.0.1:{port_of(known)}") as channel:
        return bytes(channel.unary_unary(method)(data, timeout=LIMIT_S))


def request(request: Greeting, secret: bytes = b"") -> Any:
    """Send a greeting in the session of worker 0; return the reply."""
    for _ in range(2):
        data = encode(dataclasses.asdict(request), secret, PEER)
        reply, _ = decode(call(request.cluster, data), secret, WORKER_0)
        session = reply.get("session", request.session)
        request = dataclasses.replace(request, session=session)
    return reply


def encoded(known: Sequence[str], **changes: Any) -> bytes:
    content = dataclasses.asdict(greeting(known)) | changes
    return encode(content, b"", PEER)


def malformed(known: Sequence[str]) -> list[bytes]:
    unknown = (known[0], "")  # the port must be valid
    values = {
        "worker": (-1, 3, True, 1.0, "1", None),
        "cluster": (None, "a:1", [], ["a:1", 2], ["a:1", "b\n:2"]),
        "port": ("1", None),
        "job": (1,),
        "more": (1,),
    }
    return [
        *(b"", b"\xff\x00\x1b[31m", b"[]", b"[1, 2]", b'["{}", ""]'),
        *(b"[" * 60_000, b"1" * 5000, json.dumps(["[]", ""]).encode()),
        encode({}, b"", PEER),
        *(encoded(unknown, port=port) for port in (0, 2**16)),
        *(encoded(known, **{n: v}) for n, x in values.items() for v in x),
    ]


def test_strangers_do_not_stop_the_start(
    addresses: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP, noise, silence, gRPC of other programs, malformed greetings."""
    monkeypatch.setattr(coordinator, "_END_TIMEOUT_S", 1.0)
    workers = Workers()
    workers.join(addresses[:2], 0)
    wait_for_server(addresses)
    known = addresses[:2]
    with contextlib.ExitStack() as stack:
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(5000),
            b"{}\n",
            b"",
        ):
            for _ in range(20):
                peer = socket.create_connection(("127.0.0.1", port_of(known)))
                stack.enter_context(peer).sendall(noise)
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            call(known, b"", "/tensorflow.WorkerService/GetStatus")
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            call(known, b" " * 2**23)
        texts = malformed(known)
        for text in texts:
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                call(known, text)
        workers.join(known, 1)
        assert workers.end() == {0: None, 1: None}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21
    for line in lines[:20]:
        assert "dropped a process from 127.0.0.1 port " in line
        assert line.isprintable() and len(line) < 500
    assert f"has dropped {len(texts)} processes; the first 20" in lines[20]


def test_without_a_secret_the_address_must_be_the_senders(
    addresses: Any,
) -> None:
    workers = Workers()
    workers.join((addresses[0], ""), 0)
    wait_for_server(addresses)
    for elsewhere in ("10.66.66.66:666", "a.example:666"):
        reply = request(greeting((addresses[0], elsewhere)))
        assert "must be the same host" in reply["refused"]
    workers.join((addresses[0], ""), 1)
    assert workers.end() == {0: None, 1: None}


def test_an_index_is_free_after_the_end_of_its_worker(
    addresses: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is restarted before worker 0 detects its end waits."""
    monkeypatch.setattr(waiting, "lease_s", lambda _: 0.5)
    known = addresses[:2]
    workers = Workers()
    workers.join((*known, ""), 0)
    wait_for_server(known)
    assert request(greeting((*known, ""))) == {"missing": [2], "nonce": "nonce"}
    for index in (1, 2):
        workers.join((*known, ""), index)
    assert workers.end() == {0: None, 1: None, 2: None}
    assert "dropped worker 1 from 127.0.0.1" in capsys.readouterr().err


def test_a_worker_calls_again_after_a_restart_of_worker_0(
    addresses: Any,
) -> None:
    """It has the session of the first worker 0."""
    known = (*addresses[:2], "")
    workers = Workers()
    workers.join(known, 1)
    workers.join(known, 0, "ended", timeout=1.0)
    assert isinstance(workers.wait_for("ended"), TimeoutError)
    assert isinstance(workers.wait_for(1), TimeoutError)
    for index in (0, 1, 2):
        workers.join(known, index, f"again {index}")
    results = workers.end()
    assert [results[f"again {index}"] for index in range(3)] == [None] * 3


# ---------------------------------------------------------------------- secret
@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", ""), ("", "b")])
def test_a_worker_with_another_secret(
    addresses: Any,
    ours: str,
    theirs: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """The worker raises at once; worker 0 prints its index and waits."""
    known = addresses[:2]
    monkeypatch.setenv("TFKFAC_SECRET", theirs)
    workers = Workers()
    workers.join(known, 0)
    wait_for_server(known)
    monkeypatch.setenv("TFKFAC_SECRET", ours)
    with pytest.raises(RefusedError, match="TFKFAC_SECRET must be the same"):
        wait_for_all(Cluster(known, 1), LIMIT_S)
    (line,) = capsys.readouterr().err.splitlines()
    assert "dropped worker 1" in line
    assert "another secret (TFKFAC_SECRET) or none" in line
    monkeypatch.setenv("TFKFAC_SECRET", theirs)
    workers.join(known, 1)
    assert workers.end() == {0: None, 1: None}


def test_a_signature_covers_the_role_and_the_whole_message() -> None:
    content = {"nonce": "ours", "go": ["a:1", "b:2"], "seed": 1}
    data = encode(content, b"secret", WORKER_0)
    assert decode(data, b"secret", WORKER_0) == (content, True)
    assert not decode(data, b"other", WORKER_0)[1]
    assert not decode(data, b"secret", PEER)[1]
    for old, new in ((b"ours", b"past"), (b"b:2", b"c:2"), (b"1}", b"2}")):
        assert not decode(data.replace(old, new), b"secret", WORKER_0)[1]


def test_a_recorded_message_cannot_be_used_again(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of another session, and a reply to another request."""
    monkeypatch.setenv("TFKFAC_SECRET", "secret")
    known = addresses[:2]
    workers = Workers()
    workers.join(known, 0)
    wait_for_server(known)
    old = encode(
        dataclasses.asdict(greeting(known, session="old")), b"secret", PEER
    )
    reply, is_authentic = decode(call(known, old), b"secret", WORKER_0)
    assert is_authentic and reply.keys() == {"session", "nonce"}
    recorded = encode(
        {"go": list(known), "seed": 1, "nonce": "of another request"},
        b"secret",
        WORKER_0,
    )
    with (
        monkeypatch.context() as patch,
        pytest.raises(RefusedError, match="cannot prove"),
    ):
        patch.setattr(
            rendezvous.grpc,
            "insecure_channel",
            lambda *_: contextlib.nullcontext(Recorded(recorded)),
        )
        wait_for_all(Cluster(known, 1), LIMIT_S)
    workers.join(known, 1)
    assert workers.end() == {0: None, 1: None}


@dataclasses.dataclass
class Recorded:
    """Channel of gRPC with one answer."""

    answer: bytes

    def unary_unary(self, method: str) -> Callable[..., bytes]:
        return lambda data, timeout: self.answer


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


# ------------------------------------------------------ why worker 0 is missing
NAME = "no-such-host.invalid"


@contextlib.contextmanager
def answering(port: int, answer: bytes) -> Any:
    """A server of another program that repeats an answer."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    connection.send(answer)

        connections: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    ("host", "answer", "cause"),
    [
        (NAME, None, f"errors resolving {NAME}"),
        ("127.0.0.1", None, "Connection refused"),
        ("127.0.0.1", b"HTTP/1.1 200 OK\r\n\r\n", "Failed parsing HTTP/2"),
    ],
)
def test_reminder_and_timeout_contain_the_cause(
    addresses: Any,
    host: str,
    answer: bytes | None,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.3)
    port = port_of(addresses)
    with (
        contextlib.nullcontext() if answer is None else answering(port, answer),
        pytest.raises(TimeoutError) as caught,
    ):
        wait_for_all(Cluster((f"{host}:{port}", ""), 1), 1.5)
    assert re.search(f"Last cause: .*{cause}", str(caught.value))
    lines = capsys.readouterr().err.splitlines()
    assert cause in lines[0]


def test_texts_of_worker_0_are_escaped() -> None:
    assert waiting.escape("\x1b[2J\u202e\nö" + "a" * 9**5) == (
        r"\x1b[2J\u202e\nö" + "a" * 9993
    )


@pytest.mark.parametrize("value", [0, float("nan"), True])
def test_invalid_timeouts(value: Any) -> None:
    with pytest.raises(ValueError, match="Argument `start_timeout`"):
        tfkfac.MultiWorkerMirroredStrategy(start_timeout=value)
