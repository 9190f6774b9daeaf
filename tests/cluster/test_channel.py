"""Messages between workers, here threads of one process."""

import atexit
import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tfkfac.cluster.channel import (
    PEER_EXITED,
    PEER_LOST,
    Channel,
    Connection,
    Listener,
)

LIMIT = 10.0


class Ear(Listener):
    def __init__(self, channel: Channel) -> None:
        self.heard: list[tuple[int, Any]] = []
        self._channel = channel

    def on_message(self, sender: int, message: Any) -> None:
        self.heard.append((sender, message))
        if message == {"question": True}:
            self._channel.broadcast({"answer": self._channel.index})

    def wait(self, count: int) -> list[tuple[int, Any]]:
        end = time.monotonic() + LIMIT
        while len(self.heard) < count:
            assert time.monotonic() < end, self.heard
            time.sleep(0.005)
        return self.heard


@contextlib.contextmanager
def joined(
    size: int, listener: Callable[[Channel], Listener]
) -> Iterator[list[tuple[Channel, Any]]]:
    """The first worker has a connection with each of the others."""
    pairs = {i: connected() for i in range(1, size)}
    lines = [{i: first for i, (first, _) in pairs.items()}]
    lines += [{0: second} for _, second in pairs.values()]
    channels = [Channel(i, size, own) for i, own in enumerate(lines)]
    workers = [(channel, listener(channel)) for channel in channels]
    for channel, own in workers:
        channel.start(own)
        atexit.unregister(channel.broadcast)  # or it talks when pytest ends
    yield workers
    for line in itertools.chain(*(own.values() for own in lines)):
        line.close()


@pytest.fixture
def workers() -> Iterator[list[tuple[Channel, Ear]]]:
    with joined(3, Ear) as workers:
        yield workers


def connected() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return Connection(one, LIMIT), Connection(other, LIMIT)


def test_all_hear_all_in_one_order(workers: Any) -> None:
    """An answer comes after what it answers."""

    def talk(channel: Channel) -> None:
        for number in range(100):
            channel.broadcast({"number": number})
            if (channel.index, number) == (2, 50):
                channel.broadcast({"question": True})

    threads = [threading.Thread(target=talk, args=(c,)) for c, _ in workers]
    for thread in threads:
        thread.start()
    heard = [ear.wait(304) for _, ear in workers]
    assert heard[0] == heard[1] == heard[2]
    for sender in range(3):
        own = [
            m["number"] for s, m in heard[0] if s == sender and "number" in m
        ]
        assert own == list(range(100))
    end = heard[0][heard[0].index((2, {"question": True})) :]
    assert [(s, {"answer": s}) in end for s in range(3)] == [True] * 3


def test_a_child_has_no_part_in_it(workers: Any) -> None:
    """It neither speaks nor keeps the connections of its parent."""
    (_, first), (one, _), _ = workers
    child = os.fork()
    if child == 0:
        one.broadcast({"child": True})
        time.sleep(LIMIT)
        os._exit(0)
    (line,) = one._connections.values()
    line.close()  # the last of its copies, or nobody would notice
    assert first.wait(1) == [(1, PEER_LOST)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_who_is_gone_is_told_unless_it_has_said_goodbye(workers: Any) -> None:
    (_, first), (one, _), (other, ear) = workers
    one.broadcast(PEER_EXITED)
    first.wait(1)
    hang_up(one)
    time.sleep(0.1)
    assert first.heard == [(1, PEER_EXITED)]
    hang_up(other)
    assert first.wait(2)[1:] == [(2, PEER_LOST)]
    assert (0, PEER_LOST) in ear.wait(2)


ENVELOPES = [
    b"{}",
    b"[]",
    b"null",
    b"\xff",
    b"[" * 100_000,
    b'{"from": NaN, "message": {}}',
    b'{"from": 0, "message": {"number": NaN}}',
    b'{"message": {"stop": true}}',
    b'{"from": 0}',
    b'{"from": 0, "message": null}',
    b'{"from": 0, "message": [1]}',
    b'{"from": -1, "message": {}}',
    b'{"from": 3, "message": {}}',
    b'{"from": true, "message": {}}',
    b'{"from": 1.0, "message": {}}',
    b'{"from": "1", "message": {}}',
    b'{"from": null, "message": {}}',
]


def test_malformed_messages_are_ignored_and_reported(
    workers: Any, capsys: Any
) -> None:
    """By worker 0 and by the others; the next message still arrives."""
    (first, first_ear), (second, second_ear), (_, third_ear) = workers
    (to_first,) = second._connections.values()
    for text in [b"[]", b"1", b"{", b"[" * 100_000, b"\x00"]:
        to_first._socket.sendall(text + b"\n")
    second.broadcast({"number": 1})
    first_ear.wait(1)
    for text in ENVELOPES:
        first._connections[1]._socket.sendall(text + b"\n")
    first.broadcast({"number": 2})
    expected = [(1, {"number": 1}), (0, {"number": 2})]
    assert third_ear.wait(2) == first_ear.wait(2) == expected
    assert second_ear.wait(2) == expected
    said = capsys.readouterr().err
    for index in (0, 1):
        assert said.count(f"worker {index} ignores a malformed message") == 1


class Faulty(Ear):
    def on_message(self, sender: int, message: Any) -> None:
        super().on_message(sender, message)
        raise KeyError("of a listener")

    def on_tick(self) -> None:
        raise ValueError("of a tick")


def test_an_error_of_a_listener_does_not_end_the_thread(capsys: Any) -> None:
    with joined(2, Faulty) as ((first, first_ear), (_, second_ear)):
        for number in range(2):
            first.broadcast({"number": number})
        time.sleep(0.6)  # a tick
        first.broadcast(PEER_EXITED)
        assert len(first_ear.wait(3)) == len(second_ear.wait(3)) == 3
    assert "KeyError: 'of a listener'" in capsys.readouterr().err


def hang_up(channel: Any) -> None:
    """As the end of a process does."""
    (line,) = channel._connections.values()
    line._socket.shutdown(socket.SHUT_RDWR)
