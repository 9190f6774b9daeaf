"""Failures of other workers, aborted collectives, and stalls."""

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.compat.contracts import contract
from tests.support.cluster import run
from tests.support.strategies import local_ranks, strategy
from tfkfac.cluster import watch as module
from tfkfac.cluster.channel import PEER_EXITED, PEER_LOST
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.watch import (
    StallDetector,
    Watch,
    WorkerFailedError,
    describe,
)

CLUSTER = Cluster(("host0:1", "host1:2", "host2:3"), 0)
COLLECTIVE_ERROR = tf.errors.UnavailableError(
    None, None, "a collective has failed"
)


class FakeChannel:
    index = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, message: Any) -> None:
        self.sent.append(message)


class Clock:
    """A `Watch` under a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.aborted: list[str] = []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "_GRACE_PERIOD_S", 3.0)
        monkeypatch.setattr(module, "abort_collectives", self.aborted.append)
        self.channel = FakeChannel()
        self.watch = Watch(CLUSTER, self.channel)  # type: ignore[arg-type]

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        self.watch.on_tick()
        return self.aborted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield Clock(monkeypatch)


def failed(fit: int | None) -> Any:
    return {"failed": "OSError: no disk", "fit": fit}


def test_a_failure_of_another_worker_aborts_the_collective(
    clock: Clock,
) -> None:
    cause = "worker 1 at host1:2 has failed: OSError: no disk"
    with pytest.raises(WorkerFailedError, match=cause), clock.watch.fit():
        clock.watch.on_message(1, failed(1))
        assert clock.after(2.9) == []
        assert clock.after(0.2) == [cause]
        assert clock.after(60) == [cause], "only once"
        raise COLLECTIVE_ERROR
    assert clock.channel.sent == [], "no second report"


def test_an_error_on_all_workers_aborts_nothing(clock: Clock) -> None:
    """For example an error of validation before the first step."""
    with pytest.raises(ValueError), clock.watch.fit():
        clock.watch.on_message(1, failed(1))
        raise ValueError("not the same")
    clock.watch.on_message(2, failed(1))
    with clock.watch.fit():
        assert clock.after(60) == []
    assert clock.channel.sent == [
        {"failed": "ValueError: not the same", "fit": 1}
    ]
    clock.watch.on_message(1, failed(3))
    assert clock.after(60) == [], "this worker has not reached that fit"
    with clock.watch.fit():
        assert clock.after(2.9) == []
        assert len(clock.after(0.2)) == 1


@pytest.mark.parametrize("how", [PEER_LOST, PEER_EXITED, failed(None)])
def test_the_end_of_a_process_aborts_collectives(
    clock: Clock, how: Any
) -> None:
    """Here outside of a `fit`."""
    clock.watch.on_message(2, how)
    assert clock.after(2.9) == []
    (cause,) = clock.after(0.2)
    assert cause.startswith("worker 2 at host2:3 ")


def test_the_first_event_is_the_cause(clock: Clock) -> None:
    """Worker 2 ends because of worker 1, whose `fit` is not reached here."""
    clock.watch.on_message(1, failed(1))
    clock.watch.on_message(2, PEER_EXITED)
    (cause,) = clock.after(3.1)
    assert cause.startswith("worker 1 at host1:2 has failed")


def test_a_silent_worker_is_the_cause(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an own loop, and on a worker that waits in no collective."""
    monkeypatch.setattr(module, "silent_workers", lambda error: [1, 2])
    clock.watch.report_failure(COLLECTIVE_ERROR)
    assert clock.channel.sent == [{"silent": [1, 2]}]
    clock.watch.on_message(1, *clock.channel.sent)
    clock.watch.on_message(1, PEER_LOST)
    (cause,) = clock.after(3.1)
    names = "worker 1 at host1:2 and worker 2 at host2:3"
    assert cause.startswith(f"{names} stopped answering")


def test_an_error_of_this_worker_is_broadcast(clock: Clock) -> None:
    error = tf.errors.InvalidArgumentError(
        None,
        None,
        "Graph execution error:\n\nDetected at node x defined at (most recent "
        "call last):\n<stack traces unavailable>\nOSError: no disk\nTraceback "
        '(most recent call last):\n\n  File "x.py", line 3, in f\n\nOSError: '
        "no disk\n\n\t [[{{node PyFunc}}]]",
    )
    with pytest.raises(tf.errors.InvalidArgumentError), clock.watch.fit():
        clock.watch.on_message(1, failed(1))
        raise error
    (message,) = clock.channel.sent
    assert message["failed"] == "InvalidArgumentError: OSError: no disk"
    with pytest.raises(SystemExit), clock.watch.fit():
        raise SystemExit(3)
    assert len(clock.channel.sent) == 1


def test_a_failed_collective_without_a_failed_worker(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_PERIOD_S", 0.01)
    with pytest.raises(tf.errors.UnavailableError), clock.watch.fit():
        raise COLLECTIVE_ERROR
    assert clock.channel.sent[0]["failed"] == describe(COLLECTIVE_ERROR)


def test_uncaught_exceptions_are_broadcast(clock: Clock, capsys: Any) -> None:
    error = KeyError("x")
    sys.excepthook(KeyError, error, None)
    assert clock.channel.sent == [{"failed": "KeyError: 'x'", "fit": None}]
    assert "KeyError" in capsys.readouterr().err, "the previous hook is called"


@pytest.mark.parametrize(
    ("how", "has_started"),
    [(PEER_LOST, False), (PEER_LOST, True), (PEER_EXITED, False)],
)
def test_only_a_loss_before_the_first_step_ends_the_process(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, how: Any, has_started: bool
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(module.os, "kill", lambda _, x: signals.append(x))
    if has_started:
        with clock.watch.fit():
            pass
    clock.watch.on_message(1, how)
    assert clock.after(4)
    assert not signals  # a failed collective may raise first
    clock.after(4)
    clock.after(4)
    is_ended = how == PEER_LOST and not has_started
    assert signals == ([signal.SIGTERM] if is_ended else [])


class FullDisk(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3:
            raise OSError(28, "No space left on device")


def fail_on_worker_1() -> list[str]:
    """Return the error of `fit` with any optimizer."""
    with strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    callbacks = [FullDisk()] if local_ranks() == [1] else []
    x = np.ones((40, 3), "float32")
    try:
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
    except (OSError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return []


def test_two_processes() -> None:
    """One fails in a callback; the error of the other one names the cause."""
    failure, others = run(fail_on_worker_1, workers=2)
    assert others == ["OSError", "[Errno 28] No space left on device"]
    error_type, text = failure
    assert error_type == "WorkerFailedError"
    assert text.startswith("worker 1 at 127.0.0.1:")
    assert text.endswith(f"failed: OSError: {others[1]}")


class Freeze(keras.callbacks.Callback):
    """Suspend this process for 7 s, as a debugger or a full memory does."""

    def on_test_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3:
            script = f"sleep 7; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", script])
            os.kill(os.getpid(), signal.SIGSTOP)


def freeze(frozen: list[int]) -> str:
    """Return the error of `evaluate`, with a heartbeat timeout of 2 s."""
    tensorflow = context.context()
    tensorflow.configure_coordination_service = functools.partial(
        tensorflow.configure_coordination_service, heartbeat_timeout_in_ms=2000
    )
    with strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    callbacks = [Freeze()] if local_ranks()[0] in frozen else []
    x = np.ones((400, 3), "float32")
    with pytest.raises(WorkerFailedError) as error:
        model.evaluate(
            x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks
        )
    return str(error.value)


@contract(
    "compat.strategies.silent_workers",
    "The error of a collective names the tasks without heartbeats.",
)
@pytest.mark.parametrize(("workers", "frozen"), [(2, [0]), (4, [1, 3])])
def test_all_workers_name_suspended_workers(
    workers: int, frozen: list[int]
) -> None:
    for text in run(freeze, frozen, workers=workers):
        names = re.findall(r"worker (\d) at 127.0.0.1:\d+", text)
        assert names and {int(name) for name in names} <= set(frozen), text
        assert "stopped answering" in text


# ------------------------------------------------------------------- stall
def test_a_stall_prints_the_functions_of_all_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    channel = FakeChannel()
    names = [f"worker {i} at host{i}:{i + 1}" for i in range(3)]
    stall_detector = StallDetector(names, channel)  # type: ignore[arg-type]

    def after(seconds: float) -> str:
        nonlocal now
        now += seconds
        stall_detector.on_tick()
        return str(capsys.readouterr().err)

    assert after(1000) == "", "no training"
    with stall_detector.training():
        after(59)
        stall_detector.record_step()
        assert after(59) == "" and channel.sent == []
        assert after(2) == "" and channel.sent == [{"where": True}]
        stall_detector.on_message(0, {"place": "is in execute (x.py:1)"})
        stall_detector.on_message(2, {"place": "is in batches (data.py:7)"})
        assert after(3).splitlines() == [
            "tfkfac: no step has ended for 60 s.",
            "tfkfac: worker 0 at host0:1 is in execute (x.py:1)",
            "tfkfac: worker 1 at host1:2 does not answer",
            "tfkfac: worker 2 at host2:3 is in batches (data.py:7)",
        ]
        assert after(50) == "" and len(channel.sent) == 1
        after(10)
        assert len(channel.sent) == 2, "again after twice the time"
        after(3)
    assert after(1000) == ""
    assert len(channel.sent) == 2
