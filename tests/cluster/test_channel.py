"""Messages between workers, here threads of one process."""

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tfkfac.cluster.channel import BYE, LOST, Channel, Line

LIMIT = 10.0


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[int, Any]] = []
        self.answer: Callable[[int, Any], None] | None = None

    def hear(self, sender: int, message: Any) -> None:
        self.heard.append((sender, message))
        if self.answer is not None:
            self.answer(sender, message)

    def tick(self) -> None:
        pass

    def wait(self, count: int) -> list[tuple[int, Any]]:
        end = time.monotonic() + LIMIT
        while len(self.heard) < count:
            assert time.monotonic() < end, self.heard
            time.sleep(0.005)
        return self.heard


@pytest.fixture
def workers() -> Iterator[list[tuple[Channel, Ear]]]:
    """The first has a connection with each of two others."""
    pairs = {i: connected() for i in (1, 2)}
    lines = [{i: first for i, (first, _) in pairs.items()}]
    lines += [{0: second} for _, second in pairs.values()]
    made = []
    for index, own in enumerate(lines):
        channel, ear = Channel(index, 3, own), Ear()
        channel.start(ear)
        atexit.unregister(channel.say)  # or it talks when pytest ends
        made.append((channel, ear))
    yield made
    for own in lines:
        for line in own.values():
            line.close()


def connected() -> tuple[Line, Line]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return Line(one, LIMIT), Line(other, LIMIT)


def test_all_hear_all_in_one_order(workers: Any) -> None:
    def talk(channel: Channel) -> None:
        for number in range(100):
            channel.say({"number": number})

    threads = [threading.Thread(target=talk, args=(c,)) for c, _ in workers]
    for thread in threads:
        thread.start()
    heard = [ear.wait(300) for _, ear in workers]
    assert heard[0] == heard[1] == heard[2]
    for sender in range(3):
        own = [m["number"] for s, m in heard[0] if s == sender]
        assert own == list(range(100))


def test_an_answer_comes_after_what_it_answers(workers: Any) -> None:
    for channel, ear in workers:

        def answer(sender: int, message: Any, channel: Any = channel) -> None:
            if message == {"question": True}:
                channel.say({"answer": channel.index})

        ear.answer = answer
    workers[2][0].say({"question": True})
    for _, ear in workers:
        first, *answers = ear.wait(4)
        assert first == (2, {"question": True})
        assert sorted(s for s, _ in answers) == [0, 1, 2]
        assert all(message == {"answer": s} for s, message in answers)


def test_a_report_is_for_the_first_worker(workers: Any) -> None:
    for channel, _ in workers:
        channel.report({"at": channel.index})
        channel.say({"end": True})
    heard = workers[1][1].wait(3)
    assert sorted(s for s, _ in heard) == [0, 1, 2]
    assert all(message == {"end": True} for _, message in heard)
    heard = workers[0][1].wait(6)
    assert {s for s, m in heard if m == {"at": s}} == {0, 1, 2}


def test_a_child_has_no_part_in_it(workers: Any) -> None:
    """It neither speaks nor keeps the connections of its parent."""
    (_, first), (one, _), _ = workers
    child = os.fork()
    if child == 0:
        one.say({"child": True})
        time.sleep(LIMIT)
        os._exit(0)
    (line,) = one._lines.values()
    line.close()  # the last of its copies, or nobody would notice
    assert first.wait(1) == [(1, LOST)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_who_is_gone_is_told_unless_it_has_said_goodbye(workers: Any) -> None:
    (_, first), (one, _), (other, ear) = workers
    one.say(BYE)
    first.wait(1)
    hang_up(one)
    time.sleep(0.1)
    assert first.heard == [(1, BYE)]
    hang_up(other)
    assert first.wait(2)[1:] == [(2, LOST)]
    assert (0, LOST) in ear.wait(2)


def hang_up(channel: Any) -> None:
    """As the end of a process does."""
    (line,) = channel._lines.values()
    line._socket.shutdown(socket.SHUT_RDWR)
