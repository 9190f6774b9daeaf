"""Events in the key-value store, with real processes."""

import pathlib
import time
from typing import Any

from tests.support.cluster import run
from tests.support.strategies import local_ranks, strategy
from tfkfac.cluster import events as module
from tfkfac.cluster.events import EventLog, Listener

SIZE = 3


class Recorder(Listener):
    def __init__(self) -> None:
        self.events: list[tuple[int, Any]] = []
        self.num_ticks = 0

    def on_event(self, sender: int, event: Any) -> None:
        self.events.append((sender, event))

    def on_tick(self) -> None:
        self.num_ticks += 1


def post_numbers() -> list[Any]:
    """Return the events of all workers, in the order of their arrival."""
    strategy()
    (rank,) = local_ranks()
    module._KEYS, recorder = "other events", Recorder()
    log = EventLog(rank, SIZE)
    log.start(recorder)
    for number in range(30):
        log.post({"number": number})
    end = time.monotonic() + 60
    while len(recorder.events) < 30 * SIZE and time.monotonic() < end:
        time.sleep(0.01)
    return recorder.events


def test_all_workers_receive_all_events_in_one_order() -> None:
    received = run(post_numbers, workers=SIZE)
    assert received == [received[0]] * SIZE
    for sender in range(SIZE):
        numbers = [e["number"] for s, e in received[0] if s == sender]
        assert numbers == list(range(30))


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return 4096 * int(pages)


def wait_for_ticks() -> tuple[int, float]:
    """Return the number of ticks, and the growth of the memory per tick."""
    strategy()
    (rank,) = local_ranks()
    module._KEYS, module._TICK_S = "other events", 0.001
    recorder, log = Recorder(), EventLog(rank, 2)
    log.start(recorder)
    time.sleep(1)
    first, before = recorder.num_ticks, resident_bytes()
    time.sleep(5)
    count = recorder.num_ticks - first
    return count, (resident_bytes() - before) / count


def test_ticks_do_not_leak() -> None:
    """A call of the store that ends by its timeout leaks 20 KB."""
    for count, growth in run(wait_for_ticks, workers=2):
        assert count > 500
        assert growth < 2000
