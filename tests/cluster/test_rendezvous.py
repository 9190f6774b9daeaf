"""Workers wait for each other before TensorFlow starts."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import tfkfac
from tests.support.ports import address, claim_ports
from tfkfac.cluster import rendezvous
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.rendezvous import RefusedError, wait_for_all

LIMIT = 20.0


@pytest.fixture
def addresses() -> Any:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(port) for port in claim_ports(3)]
        yield tuple(address(port) for port in ports)


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
    ) -> None:
        def run() -> None:
            try:
                cluster = Cluster(tuple(addresses), index)
                found, _, seed = wait_for_all(cluster, timeout)
                self.found.add(found.addresses)
                self.seeds.add(seed)
                result = None
            except (TimeoutError, ValueError) as error:
                result = error
            self.results[index if name is None else name] = result

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

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
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.1)
    name = f"worker {missing} at {addresses[missing]}"
    with pytest.raises(TimeoutError, match=name):
        wait_for_all(Cluster(addresses[:2], index), 0.5)
    (said,) = capsys.readouterr().err.splitlines()
    assert f"worker {index} is waiting for {name}" in said


@pytest.mark.parametrize("what", ["an index given twice", "other clusters"])
def test_refused_by_all(addresses: Any, what: str) -> None:
    meeting = Meeting()
    meeting.join(addresses, 0)
    if what == "other clusters":
        meeting.join(addresses[:2], 1)
        words = "must have the same cluster.", addresses[2]
    else:
        meeting.join(addresses, 1, "first")
        time.sleep(0.5)
        meeting.join(addresses, 1, "second")
        words = "Two processes are worker 1 at", addresses[1]
    for error in meeting.end().values():
        assert isinstance(error, RefusedError)
        assert all(word in str(error) for word in words)


def test_two_first_workers(
    addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    port = int(addresses[0].rpartition(":")[2])
    with (
        socket.create_server(("", port)),
        pytest.raises(RefusedError, match="cannot be worker 0 at"),
    ):
        wait_for_all(Cluster(addresses, 0), LIMIT)


def test_strangers_and_lost_workers_do_not_count(addresses: Any) -> None:
    meeting = Meeting()
    meeting.join(addresses, 0)
    host, _, port = addresses[0].rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, int(port)))
            break
    with connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with socket.create_connection((host, int(port))) as connection:
        hello = {"worker": 1, "cluster": addresses}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        time.sleep(0.3)
    # It was there, and is gone before another process is worker 1.
    time.sleep(0.5)
    meeting.join(addresses, 1)
    time.sleep(0.3)
    assert not meeting.results
    meeting.join(addresses, 2)
    assert meeting.end() == {0: None, 1: None, 2: None}


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError),
                         (True, TypeError), (float("nan"), ValueError)]
)  # fmt: skip
def test_wrong_timeouts(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Argument `start_timeout`"):
        tfkfac.MultiWorkerMirroredStrategy(start_timeout=value)
