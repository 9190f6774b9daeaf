"""Events in the key-value store, with real processes."""

import pathlib
import time
from typing import Any

from tests.support.cluster import run
from tests.support.strategies import local_ranks, strategy
from tfkfac.cluster import events as module
from tfkfac.cluster.events import EXITED, EventLog, Listener

SIZE, COUNT = 2, 30


class Recorder(Listener):
    def __init__(self) -> None:
        self.events: list[tuple[int, Any]] = []
        self.num_ticks = 0

    def on_event(self, sender: int, event: Any) -> None:
        self.events.append((sender, event))

    def on_tick(self) -> None:
        self.num_ticks += 1


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return 4096 * int(pages)


def post_numbers() -> tuple[list[Any], int, float, int]:
    """Post events, then wait for ticks.

    Returns:
        The events of all workers in the order of their arrival, the number of
        ticks, the growth of the memory per tick, and the number of ticks after
        the exit of this worker.
    """
    strategy()
    (rank,) = local_ranks()
    module._KEYS, module._TICK_S = "other events", 0.001
    recorder, log = Recorder(), EventLog(rank, SIZE)
    log.start(recorder)
    for number in range(COUNT):
        log.post({"number": number})
    end = time.monotonic() + 60
    while len(recorder.events) < COUNT * SIZE and time.monotonic() < end:
        time.sleep(0.01)
    first, before = recorder.num_ticks, resident_bytes()
    while recorder.num_ticks < first + 400 and time.monotonic() < end:
        time.sleep(0.01)
    count = recorder.num_ticks - first
    growth = (resident_bytes() - before) / count
    events = recorder.events[: COUNT * SIZE]
    log.post(EXITED)
    assert log._has_exited.wait(60)
    time.sleep(0.1)
    first = recorder.num_ticks
    time.sleep(0.2)
    return events, count, growth, recorder.num_ticks - first


def test_all_workers_receive_all_events_in_one_order() -> None:
    """A call of the store that ends by its timeout leaks 20 KB."""
    results = run(post_numbers, workers=SIZE)
    for events, num_ticks, growth, late_ticks in results:
        assert events == results[0][0]
        for sender in range(SIZE):
            numbers = [e["number"] for s, e in events if s == sender]
            assert numbers == list(range(COUNT))
        assert num_ticks > 200
        assert growth < 2000
        assert late_ticks == 0  # no abort while the interpreter ends
