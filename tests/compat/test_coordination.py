"""TensorFlow's coordination service, with real processes."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.compat.contracts import contract
from tests.support.cluster import run
from tests.support.strategies import local_ranks, strategy
from tfkfac.compat.coordination import (
    HEARTBEAT_TIMEOUT_S,
    abort_collectives,
    get_text,
    set_text,
    silent_workers,
)


def use_store() -> list[Any]:
    """Store and read texts; then worker 1 is suspended for some time."""
    job = strategy()
    (rank,) = local_ranks()
    timeout_ms = context.context().coordination_service.heartbeat_timeout_in_ms
    results = [timeout_ms, set_text("first", str(rank))]
    set_text(f"key/{rank}", "x" * 3_000_000)
    results += [len(get_text(f"key/{i}", 60) or "") for i in (0, 1)]
    start = time.monotonic()
    results.append(get_text("absent", 0.5))
    assert 0.4 < time.monotonic() - start < 10
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 30; kill -CONT {os.getpid()}"])
        set_text("suspended", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return results
    process = int(get_text("suspended", 60) or "")
    assert silent_workers() == []
    end = time.monotonic() + 12
    while not (silent := silent_workers()) and time.monotonic() < end:
        time.sleep(0.1)
    results.append(silent)
    count = sys.getrefcount(tf.errors.UnavailableError)
    for _ in range(5):
        assert silent_workers() == [1]
    # Each call would release a reference; other threads may hold some.
    results.append(sys.getrefcount(tf.errors.UnavailableError) > count - 5)
    abort_collectives("a reason")
    with pytest.raises(tf.errors.OpError):
        job.reduce("SUM", job.run(lambda: tf.constant(1.0)), axis=None)
    os.kill(process, signal.SIGCONT)
    return results


@contract("compat.coordination.configure", "The strategy keeps its settings.")
@contract("compat.coordination.set_text", "A key keeps its first text.")
@contract("compat.coordination.get_text", "It waits for a limited time.")
@contract(
    "compat.coordination.silent_workers",
    "The states of the tasks name those without heartbeats.",
)
@contract("compat.coordination.abort_collectives", "Later collectives fail.")
def test_coordination_service() -> None:
    first, second = run(use_store, workers=2)
    assert first[0] == second[0] == 1000 * HEARTBEAT_TIMEOUT_S
    assert {first[1], second[1]} == {True, False}
    assert first[2:5] == second[2:5] == [3_000_000, 3_000_000, None]
    assert first[5] == [1]
    assert first[6], "the class of the errors would be freed"
