"""Workers wait for each other before TensorFlow starts."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import tfkfac
from tests.support.ports import address, claim_ports
from tfkfac.cluster import rendezvous, waiting
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.rendezvous import RefusedError, wait_for_all

LIMIT = 20.0
SOON = 3.0  # seconds in which an error at once is raised on a busy machine


@pytest.fixture
def addresses() -> Any:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(port) for port in claim_ports(3)]
        yield tuple(address(port) for port in ports)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFKFAC_SECRET", raising=False)


class Meeting:
    """Calls `wait_for_all` in threads, as workers would in processes."""

    def __init__(self) -> None:
        self.results: dict[Any, BaseException | None] = {}
        self.found: set[tuple[str, ...]] = set()
        self.seeds: set[int | None] = set()
        self._threads: list[threading.Thread] = []

    def join(
        self,
        addresses: Sequence[str],
        index: int,
        name: Any = None,
        timeout: float = LIMIT,
        job: str = "",
    ) -> None:
        def run() -> None:
            try:
                cluster = Cluster(tuple(addresses), index, job)
                found, _, seed = wait_for_all(cluster, timeout)
                self.found.add(found.addresses)
                self.seeds.add(seed)
                result = None
            except (TimeoutError, ValueError) as error:
                result = error
            self.results[index if name is None else name] = result

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def wait_for(self, name: Any, seconds: float = SOON) -> Any:
        """Return the result of one worker, while others still wait."""
        end = time.monotonic() + seconds
        while name not in self.results:
            assert time.monotonic() < end, f"{name} still waits"
            time.sleep(0.01)
        return self.results[name]

    def end(self) -> dict[Any, BaseException | None]:
        for thread in self._threads:
            thread.join(LIMIT)
        assert len(self.results) == len(self._threads)
        return self.results


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_on_when_all_are_there(
    addresses: Any, order: Sequence[int]
) -> None:
    meeting = Meeting()
    for index in order[:-1]:
        meeting.join(addresses, index)
    time.sleep(0.3)
    assert not meeting.results, "two of three went on"
    meeting.join(addresses, order[-1])
    assert meeting.end() == {0: None, 1: None, 2: None}
    # TensorFlow's server finds the port free.
    port = int(addresses[0].rpartition(":")[2])
    with socket.create_server(("", port)):
        pass


def test_all_workers_have_one_seed_for_each_job(addresses: Any) -> None:
    seeds = set()
    for _ in range(3):
        meeting = Meeting()
        for index in range(3):
            meeting.join(addresses, index)
        assert meeting.end() == {0: None, 1: None, 2: None}
        (seed,) = meeting.seeds
        assert seed is not None and 0 <= seed < 2**31
        seeds.add(seed)
    assert len(seeds) == 3
    alone = wait_for_all(Cluster(addresses[:1], 0), None)
    assert alone.seed is None


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_one_address_is_enough(host: str) -> None:
    """Where the first one listens; all learn the same of the others."""
    with contextlib.closing(*claim_ports(1)) as claim:
        first = f"{host}:{claim.getsockname()[1]}"
        meeting = Meeting()
        for index in (2, 0, 1):
            meeting.join((first, "", ""), index)
        assert meeting.end() == {0: None, 1: None, 2: None}
    (addresses,) = meeting.found
    assert addresses[0] == first
    assert len(set(addresses)) == 3
    for other in addresses[1:]:
        own, _, port = other.rpartition(":")
        assert own == host
        with socket.create_server(("", int(port))):
            pass


def test_a_worker_that_never_comes_is_named(addresses: Any) -> None:
    meeting = Meeting()
    meeting.join(addresses, 0, timeout=0.5)
    meeting.join(addresses, 2)
    for error in meeting.end().values():
        assert isinstance(error, TimeoutError)
        assert f"for worker 1 at {addresses[1]}" in str(error)
        assert "worker 2 at" not in str(error)


@pytest.mark.parametrize(("index", "missing"), [(0, 1), (1, 0)])
def test_it_says_for_whom_it_waits(
    addresses: Any,
    index: int,
    missing: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Once, and then more and more rarely."""
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.1)
    name = f"worker {missing} at {addresses[missing]}"
    with pytest.raises(TimeoutError, match=name):
        wait_for_all(Cluster(addresses[:2], index), 0.5)
    (said,) = capsys.readouterr().err.splitlines()
    assert f"worker {index} is waiting for {name}" in said


@pytest.mark.parametrize("what", ["index", "cluster", "job"])
def test_a_mistaken_worker_is_refused_at_once(
    addresses: Any, what: str, capsys: Any
) -> None:
    """It is given the reason; the others meet."""
    meeting = Meeting()
    for index in (0, 1):
        meeting.join(addresses, index, job="job 7")
    time.sleep(0.3)
    if what == "index":
        meeting.join(addresses, 1, "mistaken")
        words = "Two processes are worker 1 at", addresses[1]
    elif what == "cluster":
        meeting.join(addresses[:2], 1, "mistaken")
        words = "must have the same cluster.", addresses[2]
    else:
        meeting.join(addresses, 2, "mistaken", job="job 8")
        words = "another job", "'job 8' here, 'job 7' there"
    error = meeting.wait_for("mistaken")
    assert isinstance(error, RefusedError)
    assert all(word in str(error) for word in words)
    assert len(meeting.results) == 1
    meeting.join(addresses, 2)
    results = meeting.end()
    assert [results[index] for index in range(3)] == [None] * 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("tfkfac: worker 0 has dropped worker ")
    assert all(word in said for word in words)


def test_a_mistaken_worker_is_named_in_the_end(addresses: Any) -> None:
    meeting = Meeting()
    meeting.join(addresses[:2], 0, timeout=1.0)
    meeting.join(addresses, 2)
    error = meeting.wait_for(0)
    assert isinstance(error, TimeoutError)
    assert "for worker 1 at" in str(error)
    assert "Dropped: worker 2 from 127.0.0.1" in str(error)
    assert isinstance(meeting.end()[2], RefusedError)


def test_two_first_workers(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is that of a process that does not answer."""
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.2)
    port = int(addresses[0].rpartition(":")[2])
    with (
        socket.create_server(("", port)),
        pytest.raises(RefusedError, match="cannot be worker 0 at"),
    ):
        wait_for_all(Cluster(addresses, 0), LIMIT)


@pytest.mark.parametrize(
    ("jobs", "first_ends"),
    [(("", ""), True), (("A", ""), True), (("A", "A"), True),
     (("A", "B"), False)],
)  # fmt: skip
def test_two_jobs_with_one_port(
    addresses: Any, jobs: Any, first_ends: bool
) -> None:
    """Their workers never meet; known jobs are kept apart."""
    known = (addresses[0], "")
    meeting = Meeting()
    meeting.join(known, 0, "A0", job=jobs[0])
    time.sleep(0.3)
    meeting.join(known, 0, "B0", job=jobs[1])
    assert "Two jobs need two ports" in str(meeting.wait_for("B0"))
    if first_ends:
        assert "Two processes are worker 0" in str(meeting.wait_for("A0"))
        return
    meeting.join(known, 1, "B1", job=jobs[1])
    assert "is of another job" in str(meeting.wait_for("B1"))
    meeting.join(known, 1, "A1", job=jobs[0])
    results = meeting.end()
    assert results["A0"] is None and results["A1"] is None


def test_a_reason_of_worker_0_is_escaped() -> None:
    assert waiting.escape("\x1b[2J\u202e\nö" + "a" * 9**5) == (
        r"\x1b[2J\u202e\nö" + "a" * 9993
    )


# ------------------------------------------------------ why worker 0 is missing
NAME = "no-such-host.invalid"
NO_ADDRESS = f"host name '{NAME}' cannot be resolved"
REFUSED = "the connection is refused"
NOT_OURS = "does not answer as worker 0"


@contextlib.contextmanager
def answering(port: int, answer: bytes) -> Any:
    """A server that is not ours: it answers at once, again and again."""
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
        (NAME, None, NO_ADDRESS),
        ("a..b", None, "host name 'a..b' cannot be resolved"),
        ("127.0.0.1", None, REFUSED),
        ("127.0.0.1", b"HTTP/1.1 400 Bad Request\r\n\r\n", NOT_OURS),
        ("127.0.0.1", b'{"go": [], "seed": 1}\n', NOT_OURS),
        ("127.0.0.1", b"[" * 100_000 + b"\n", NOT_OURS),
        ("127.0.0.1", b" ", NOT_OURS),  # and no end
        ("127.0.0.1", b"", NOT_OURS),
    ],
)
def test_the_cause_is_said_soon_and_in_the_end(
    addresses: Any,
    host: str,
    answer: bytes | None,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.2)
    port = int(addresses[0].rpartition(":")[2])
    start = time.monotonic()
    with (
        contextlib.nullcontext() if answer is None else answering(port, answer),
        pytest.raises(TimeoutError) as caught,
    ):
        wait_for_all(Cluster((f"{host}:{port}", ""), 1), 1.0)
    assert time.monotonic() - start < 2.0
    assert re.search(f"Last cause: .*{cause}", str(caught.value))
    said = capsys.readouterr().err.splitlines()
    assert cause in said[0]


def test_a_name_server_that_hangs_does_not_extend_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rendezvous.socket, "getaddrinfo", lambda *_, **__: time.sleep(5)
    )
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer of the name server"):
        wait_for_all(Cluster(("host:1", ""), 1), 0.3)
    assert time.monotonic() - start < 2.0


def test_a_name_that_is_published_late_is_waited_for(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the name of a pod of Kubernetes."""
    resolve, published = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        if host != "pod-0.service":
            return resolve(host, port, **options)
        if not published.is_set():
            raise socket.gaierror(-2, "Name or service not known")
        return resolve("127.0.0.1", port, **options)

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", getaddrinfo)
    known = (addresses[0].replace("127.0.0.1", "pod-0.service"), "")
    meeting = Meeting()
    for index in (0, 1):
        meeting.join(known, index)
    time.sleep(0.3)
    assert not meeting.results
    published.set()
    assert meeting.end() == {0: None, 1: None}


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError),
                         (True, TypeError), (float("nan"), ValueError)]
)  # fmt: skip
def test_wrong_timeouts(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Argument `start_timeout`"):
        tfkfac.MultiWorkerMirroredStrategy(start_timeout=value)
