"""Messages between workers, which are threads of one process."""

import atexit
import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tfkfac.cluster.channel import (
    PEER_EXITED,
    PEER_LOST,
    Channel,
    Connection,
    Listener,
)

LIMIT_S = 10.0


def wait_until(condition: Callable[[], Any], seconds: float = LIMIT_S) -> Any:
    """Return the first true value of a condition; fail after a time limit."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


class Recorder(Listener):
    def __init__(self, channel: Channel) -> None:
        self.messages: list[tuple[int, Any]] = []
        self._channel = channel

    def on_message(self, sender: int, message: Any) -> None:
        self.messages.append((sender, message))
        if message == {"question": True}:
            self._channel.broadcast({"answer": self._channel.index})

    def wait(self, count: int) -> list[tuple[int, Any]]:
        wait_until(lambda: len(self.messages) >= count)
        return self.messages


@contextlib.contextmanager
def connected_workers(
    size: int, listener: Callable[[Channel], Listener]
) -> Iterator[list[tuple[Channel, Any]]]:
    """Connect worker 0 with each other worker; start their channels."""
    pairs = {i: connection_pair() for i in range(1, size)}
    connections = [{i: first for i, (first, _) in pairs.items()}]
    connections += [{0: second} for _, second in pairs.values()]
    channels = [Channel(i, size, local) for i, local in enumerate(connections)]
    workers = [(channel, listener(channel)) for channel in channels]
    for channel, attached in workers:
        channel.start(attached)
        atexit.unregister(channel.broadcast)  # no message at the end of pytest
    yield workers
    for connection in itertools.chain(*(x.values() for x in connections)):
        connection.close()


@pytest.fixture
def workers() -> Iterator[list[tuple[Channel, Recorder]]]:
    with connected_workers(3, Recorder) as workers:
        yield workers


def connection_pair() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    return Connection(client, LIMIT_S), Connection(peer, LIMIT_S)


def test_all_workers_receive_all_messages_in_one_order(workers: Any) -> None:
    """An answer comes after its question."""

    def send(channel: Channel) -> None:
        for number in range(100):
            channel.broadcast({"number": number})
            if (channel.index, number) == (2, 50):
                channel.broadcast({"question": True})

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(send, [channel for channel, _ in workers]))
    messages = [recorder.wait(304) for _, recorder in workers]
    assert messages[0] == messages[1] == messages[2]
    for sender in range(3):
        numbers = [
            m["number"] for s, m in messages[0] if s == sender and "number" in m
        ]
        assert numbers == list(range(100))
    end = messages[0][messages[0].index((2, {"question": True})) :]
    assert [(s, {"answer": s}) in end for s in range(3)] == [True] * 3


def test_a_forked_child_closes_its_connections(workers: Any) -> None:
    """The child sends nothing; the end of the parent is still detected."""
    (_, first), (channel, _), _ = workers
    child = os.fork()
    if child == 0:
        channel.broadcast({"child": True})
        time.sleep(LIMIT_S)
        os._exit(0)
    (connection,) = channel._connections.values()
    connection.close()  # the last copy, so worker 0 detects the end
    assert first.wait(1) == [(1, PEER_LOST)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_lost_worker_is_reported_unless_it_has_exited(workers: Any) -> None:
    (_, first), (second, _), (third, recorder) = workers
    second.broadcast(PEER_EXITED)
    first.wait(1)
    disconnect(second)
    wait_until(lambda: 1 not in workers[0][0]._connections)
    assert first.messages == [(1, PEER_EXITED)]
    disconnect(third)
    assert first.wait(2)[1:] == [(2, PEER_LOST)]
    assert (0, PEER_LOST) in recorder.wait(2)


ENVELOPES = [
    b"null",
    b"\xff",
    b"[" * 100_000,
    b'{"from": 0, "message": {"number": NaN}}',
    b'{"message": {"stop": true}}',
    b'{"from": 0}',
    b'{"from": 0, "message": [1]}',
    b'{"from": -1, "message": {}}',
    b'{"from": 3, "message": {}}',
    b'{"from": true, "message": {}}',
    b'{"from": "1", "message": {}}',
]


def test_malformed_messages_are_ignored_and_reported(
    workers: Any, capsys: Any
) -> None:
    """On worker 0 and on other workers; the next message still arrives."""
    first, second, _ = (channel for channel, _ in workers)
    (to_first,) = second._connections.values()
    for text in [b"[]", b"{", b"[" * 100_000]:
        to_first._socket.sendall(text + b"\n")
    second.broadcast({"number": 1})
    workers[0][1].wait(1)
    for text in ENVELOPES:
        first._connections[1]._socket.sendall(text + b"\n")
    first.broadcast({"number": 2})
    for _, recorder in workers:
        assert recorder.wait(2) == [(1, {"number": 1}), (0, {"number": 2})]
    errors = capsys.readouterr().err
    for index in (0, 1):
        assert errors.count(f"worker {index} ignores a malformed message") == 1


class Faulty(Recorder):
    """Listener whose methods raise errors."""

    def on_message(self, sender: int, message: Any) -> None:
        super().on_message(sender, message)
        raise KeyError("of a listener")

    def on_tick(self) -> None:
        self.messages.append((-1, "tick"))
        raise ValueError("of a tick")


def test_an_error_of_a_listener_does_not_end_the_thread(capsys: Any) -> None:
    with connected_workers(2, Faulty) as ((first, _), (_, recorder)):
        first.broadcast({"number": 0})
        wait_until(lambda: (-1, "tick") in recorder.messages)
        first.broadcast({"number": 1})
        wait_until(lambda: (0, {"number": 1}) in recorder.messages)
    assert "KeyError: 'of a listener'" in capsys.readouterr().err


def disconnect(channel: Any) -> None:
    """Close the connection as the end of a process does."""
    (connection,) = channel._connections.values()
    connection._socket.shutdown(socket.SHUT_RDWR)
