"""Rendezvous of the workers before TensorFlow starts."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import tfkfac
from tests.cluster.test_channel import wait_until
from tests.support.ports import address, claim_ports
from tfkfac.cluster import rendezvous, waiting
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.rendezvous import RefusedError, wait_for_all

LIMIT_S = 20.0
SHORT_S = 3.0  # limit of an immediate error on a busy machine


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
                complete, _, seed = wait_for_all(cluster, timeout)
                self.clusters.add(complete.addresses)
                self.seeds.add(seed)
                result = None
            except (TimeoutError, ValueError) as error:
                result = error
            self.results[index if name is None else name] = result

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def wait_for(self, name: Any, seconds: float = SHORT_S) -> Any:
        """Return the result of one worker, while others still wait."""
        wait_until(lambda: name in self.results, seconds)
        return self.results[name]

    def end(self) -> dict[Any, BaseException | None]:
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert len(self.results) == len(self._threads)
        return self.results


def test_all_workers_start_when_all_are_connected(addresses: Any) -> None:
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
        with socket.create_server(("", int(addresses[0].rpartition(":")[2]))):
            pass
        (seed,) = workers.seeds
        assert seed is not None and 0 <= seed < 2**31
        seeds.add(seed)
    assert len(seeds) == 2
    assert wait_for_all(Cluster(addresses[:1], 0), None).seed is None


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_only_the_address_of_worker_0_is_required(host: str) -> None:
    """All workers receive the same addresses, with free ports."""
    with contextlib.closing(*claim_ports(1)) as claim:
        first = f"{host}:{claim.getsockname()[1]}"
        workers = Workers()
        for index in (2, 0, 1):
            workers.join((first, "", ""), index)
        assert workers.end() == {0: None, 1: None, 2: None}
    (addresses,) = workers.clusters
    assert addresses[0] == first
    assert len(set(addresses)) == 3
    for other in addresses[1:]:
        assert other.rpartition(":")[0] == host
        with socket.create_server(("", int(other.rpartition(":")[2]))):
            pass


def test_the_timeout_names_missing_and_dropped_workers(addresses: Any) -> None:
    workers = Workers()
    workers.join(addresses, 0, timeout=0.5)
    workers.join(addresses, 2)
    workers.join(addresses[:2], 1)
    results = workers.end()
    assert isinstance(results.pop(1), RefusedError)
    for error in results.values():
        assert isinstance(error, TimeoutError)
        assert f"for worker 1 at {addresses[1]}" in str(error)
        assert "Dropped: worker 1 from 127.0.0.1" in str(error)
        assert "worker 2 at" not in str(error)


@pytest.mark.parametrize("index", [0, 1])
def test_reminders_name_the_missing_worker(
    addresses: Any, index: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One reminder in the first 0.5 s."""
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.1)
    name = f"worker {1 - index} at {addresses[1 - index]}"
    with pytest.raises(TimeoutError, match=name):
        wait_for_all(Cluster(addresses[:2], index), 0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"worker {index} is waiting for {name}" in line


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


def test_the_port_of_worker_0_is_in_use(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that does not answer."""
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.2)
    port = int(addresses[0].rpartition(":")[2])
    with (
        socket.create_server(("", port)),
        pytest.raises(RefusedError, match="cannot be worker 0 at"),
    ):
        wait_for_all(Cluster(addresses, 0), LIMIT_S)


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
    time.sleep(0.3)
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


def test_a_reason_of_worker_0_is_escaped() -> None:
    assert waiting.escape("\x1b[2J\u202e\nö" + "a" * 9**5) == (
        r"\x1b[2J\u202e\nö" + "a" * 9993
    )


# ------------------------------------------------------ why worker 0 is missing
NAME = "no-such-host.invalid"
NOT_WORKER_0 = "does not answer as worker 0"


@contextlib.contextmanager
def answering(port: int, answer: bytes) -> Any:
    """A server of another program that repeats an answer."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    while answer and len(answer) == connection.send(answer):
                        time.sleep(0.05)

        connections: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    ("host", "answer", "cause"),
    [
        (NAME, None, f"host name '{NAME}' cannot be resolved"),
        ("127.0.0.1", None, "the connection is refused"),
        ("127.0.0.1", b'{"go": [], "seed": 1}\n', NOT_WORKER_0),
        ("127.0.0.1", b"[" * 100_000 + b"\n", NOT_WORKER_0),
        ("127.0.0.1", b" ", NOT_WORKER_0),  # no end of line
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
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.1)
    port = int(addresses[0].rpartition(":")[2])
    start = time.monotonic()
    with (
        contextlib.nullcontext() if answer is None else answering(port, answer),
        pytest.raises(TimeoutError) as caught,
    ):
        wait_for_all(Cluster((f"{host}:{port}", ""), 1), 0.5)
    assert time.monotonic() - start < SHORT_S
    assert re.search(f"Last cause: .*{cause}", str(caught.value))
    lines = capsys.readouterr().err.splitlines()
    assert cause in lines[0]


def test_a_name_server_that_is_slow_or_does_not_know_the_host_yet(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the name of a pod of Kubernetes."""
    resolve, published = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        if host == "slow":
            published.wait(LIMIT_S)
        if host != "pod-0.service":
            return resolve(host, port, **options)
        if not published.is_set():
            raise socket.gaierror(-2, "Name or service not known")
        return resolve("127.0.0.1", port, **options)

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", getaddrinfo)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer of the name server"):
        wait_for_all(Cluster(("slow:1", ""), 1), 0.3)
    assert time.monotonic() - start < SHORT_S
    known = (addresses[0].replace("127.0.0.1", "pod-0.service"), "")
    workers = Workers()
    for index in (0, 1):
        workers.join(known, index)
    time.sleep(0.3)
    assert not workers.results
    published.set()
    assert workers.end() == {0: None, 1: None}


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (float("nan"), ValueError), (True, TypeError)],
)
def test_invalid_timeouts(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Argument `start_timeout`"):
        tfkfac.MultiWorkerMirroredStrategy(start_timeout=value)
