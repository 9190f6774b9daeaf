"""Collectives can be ended from outside; see `compat/strategies.py`."""

import threading
import time
from typing import Any

import pytest

from tests.compat.contracts import contract
from tests.support.cluster import run
from tfkfac.compat.strategies import abort_collectives


@pytest.mark.slow
@contract(
    "compat.strategies.abort_collectives",
    "`abort_collective_ops` of TensorFlow's context ends a collective that "
    "waits, from another thread and with a message.",
)
def test_a_collective_that_waits_is_ended() -> None:
    (text, seconds), other = run(f"{__name__}:wait", workers=2)
    assert "UnavailableError" in text
    assert "worker 1 is late" in text
    assert seconds < 5
    assert other is None


def wait() -> Any:
    """Worker 0 waits for the other in a collective, and stops waiting."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    if strategy.cluster_resolver.task_id == 1:
        time.sleep(4)
        return None

    @tf.function
    def add() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(1.0))

    threading.Timer(1, abort_collectives, ["worker 1 is late"]).start()
    start = time.monotonic()
    try:
        strategy.run(add)
    except tf.errors.UnavailableError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return None
