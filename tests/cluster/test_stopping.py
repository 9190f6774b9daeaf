"""All workers stop after the same batch, whenever and whoever asks."""

import random
import threading
import time
from typing import Any

import pytest

from tests.cluster.test_channel import LIMIT, joined
from tfkfac.cluster.channel import LOST
from tfkfac.cluster.stopping import Stopping


@pytest.mark.parametrize("seed", range(3))
def test_one_batch_for_all(seed: int) -> None:
    """Batches are steps that need all workers, as of synchronous training."""
    size = 2 + seed
    step = threading.Barrier(size, timeout=LIMIT)
    ends: list[int | None] = [None] * size

    def train(stopping: Stopping, index: int) -> None:
        chance = random.Random(seed + 100 * index)
        for batch in range(1, 200):
            step.wait()
            time.sleep(chance.choice([0, 0, 0.001]))
            if batch == 20 + seed and index in (seed % size, size - 1):
                stopping.request()
            if stopping.batch_ends():
                ends[index] = batch
                return

    with joined(size, Stopping) as workers:
        threads = [
            threading.Thread(target=train, args=(stopping, i))
            for i, (_, stopping) in enumerate(workers)
        ]
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
