"""All workers stop after the same batch, whenever and whoever asks."""

import random
import threading
import time
from typing import Any

import pytest

from tfkfac.cluster.channel import LOST
from tfkfac.cluster.stopping import Stopping

LIMIT = 20.0


class Wire:
    """All that is said reaches all in one order, each when it likes."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.said: list[tuple[int, Any]] = []
        self.workers = [Stopping(End(self, i)) for i in range(size)]
        self._random = [random.Random(1000 * seed + i) for i in range(size)]
        for index in range(size):
            threading.Thread(
                target=self._deliver, args=(index,), daemon=True
            ).start()

    def _deliver(self, index: int) -> None:
        heard = 0
        while True:
            time.sleep(self._random[index].choice([0, 0.0005, 0.003]))
            if heard < len(self.said):
                self.workers[index].hear(*self.said[heard])
                heard += 1


class End:
    def __init__(self, wire: Wire, index: int) -> None:
        self.size = wire.size
        self._wire, self._index = wire, index

    def say(self, message: Any) -> None:
        self._wire.said.append((self._index, message))


@pytest.mark.parametrize("seed", range(8))
def test_one_batch_for_all(seed: int) -> None:
    """Batches are steps that need all workers, as of synchronous training."""
    size = 2 + seed % 3
    wire = Wire(size, seed)
    step = threading.Barrier(size, timeout=LIMIT)
    ends: list[int | None] = [None] * size

    def train(index: int) -> None:
        chance = random.Random(seed + 100 * index)
        stopping = wire.workers[index]
        for batch in range(1, 200):
            step.wait()
            time.sleep(chance.choice([0, 0, 0.001]))
            if batch == 20 + seed and index in (seed % size, size - 1):
                stopping.request()
            if stopping.batch_ends():
                ends[index] = batch
                return

    threads = [threading.Thread(target=train, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert ends[0] is not None
    assert ends[0] >= 20 + seed
    assert ends == [ends[0]] * size


def test_one_worker_stops_at_once() -> None:
    stopping = Stopping()
    assert not stopping.batch_ends()
    stopping.request()
    assert stopping.batch_ends()
    assert not stopping.batch_ends()


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    class Silent:
        size = 2

        def say(self, message: Any) -> None:
            pass

    stopping = Stopping(Silent())  # type: ignore[arg-type]
    stopping.hear(1, {"stop": True})
    stopping.hear(1, LOST)
    assert not stopping.batch_ends()
