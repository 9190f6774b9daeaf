"""Failures of other workers, with simulated events and time.

`test_faults.py` has failures of real processes.
"""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from tfkfac.cluster import watch as module
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.events import EXITED, LOST
from tfkfac.cluster.watch import (
    StallDetector,
    Watch,
    WorkerFailedError,
    describe,
)

CLUSTER = Cluster(("host0:1", "host1:2", "host2:3"), 0)
COLLECTIVE_ERROR = tf.errors.UnavailableError(
    None, None, "Collective ops is aborted by: a lost connection"
)
SHORT_S, LONG_S = module._GRACE_PERIOD_S, module._LONG_GRACE_PERIOD_S
FAILURE = "worker 1 at host1:2 has failed: OSError: no disk"


class FakeLog:
    index = 0

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, event: Any) -> None:
        self.posted.append(event)

    def tick_after(self, seconds: float) -> None:
        pass


class Clock:
    """A `Watch` under a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.aborted: list[str] = []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "abort_collectives", self.aborted.append)
        monkeypatch.setattr(
            module, "_diagnose", lambda address: f"of {address} is lost"
        )
        self.log = FakeLog()
        self.watch = Watch(CLUSTER, self.log)  # type: ignore[arg-type]

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


def test_an_error_on_all_workers_aborts_nothing(clock: Clock) -> None:
    """For example an error of validation before the first step."""
    with pytest.raises(ValueError), clock.watch.fit():
        clock.watch.on_event(1, failed(1))
        raise ValueError("not the same")
    clock.watch.on_event(2, failed(1))
    with clock.watch.fit():
        assert clock.after(60) == []
    assert clock.log.posted == [
        {"failed": "ValueError: not the same", "fit": 1}
    ]
    clock.watch.on_event(1, failed(3))
    assert clock.after(60) == [], "this worker has not reached that fit"
    with (
        pytest.raises(WorkerFailedError, match=FAILURE),
        clock.watch.fit(),  # before its first step
    ):
        assert clock.after(0.9 * LONG_S) == []
        assert clock.after(0.2 * LONG_S) == [FAILURE]
        assert clock.after(60) == [FAILURE], "only once"
        raise COLLECTIVE_ERROR
    assert len(clock.log.posted) == 1, "no second report"


@pytest.mark.parametrize(
    ("event", "seconds", "cause"),
    [
        (EXITED, LONG_S, "worker 2 at host2:3 has ended."),
        (failed(None), SHORT_S, "worker 2 at host2:3 has failed: "),
        ({LOST: list(range(1, 9))}, SHORT_S, "worker 1 at "),
    ],
)
def test_the_end_of_a_process_aborts_collectives(
    clock: Clock, event: Any, seconds: float, cause: str
) -> None:
    """Also outside of a `fit`."""
    clock.watch.on_event(2, event)
    assert clock.after(0.9 * seconds) == []
    (text,) = clock.after(0.2 * seconds)
    assert text.startswith(cause)
    assert ("6 others stopped answering" in text) == (LOST in event)


def test_the_first_event_is_the_cause(clock: Clock) -> None:
    """Worker 2 ends because of worker 1, whose `fit` is not reached here."""
    clock.watch.on_event(1, failed(1))
    clock.watch.on_event(2, EXITED)
    assert clock.after(1.1 * LONG_S) == [FAILURE]


def test_errors_of_this_worker(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The text of a Python error in a graph; no exits; collective errors."""
    monkeypatch.setattr(module, "_CAUSE_TIMEOUT_S", 0.01)
    error = tf.errors.InvalidArgumentError(
        None,
        None,
        "Graph execution error:\n\nDetected at node x defined at (most recent "
        "call last):\n<stack traces unavailable>\nOSError: no disk\nTraceback "
        '(most recent call last):\n\n  File "x.py", line 3, in f\n\nOSError: '
        "no disk\n\n\t [[{{node PyFunc}}]]",
    )
    for raised in (error, SystemExit(3), COLLECTIVE_ERROR):
        with pytest.raises(type(raised)), clock.watch.fit():
            raise raised
    sys.excepthook(KeyError, KeyError("x"), None)
    assert [event["failed"] for event in clock.log.posted] == [
        "InvalidArgumentError: OSError: no disk",
        describe(COLLECTIVE_ERROR),
        "KeyError: 'x'",
    ]
    assert "KeyError" in capsys.readouterr().err, "the previous hook is called"
    # In a loop of the user's, where TensorFlow's error names no address.
    clock.watch.on_event(1, {LOST: [2]})
    sys.excepthook(tf.errors.UnavailableError, COLLECTIVE_ERROR, None)
    text = "tfkfac: worker 2 at host2:3 of host2:3 is lost.\n"
    assert capsys.readouterr().err.startswith(text)
    assert len(clock.log.posted) == 3


@pytest.mark.parametrize("has_started", [False, True])
def test_only_a_loss_before_the_first_step_ends_the_process(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(module.os, "kill", lambda _, x: signals.append(x))
    if has_started:
        with clock.watch.fit():
            pass
    clock.watch.on_event(1, {LOST: [1]})
    assert clock.after(1.1 * LONG_S)
    assert not signals  # a failed collective may raise first
    clock.after(1.1 * LONG_S)
    clock.after(1.1 * LONG_S)
    assert signals == ([] if has_started else [module.signal.SIGTERM])


def test_why_a_worker_sends_no_heartbeats() -> None:
    """The system of a suspended process accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "is suspended" in module._diagnose(address)
    assert "it was killed" in module._diagnose(address)
    assert "is down" in module._diagnose("no-such-host.invalid:1")


def test_a_stall_prints_the_functions_of_this_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    stall_detector = StallDetector("worker 1 at host1:2")
    ending = threading.Event()
    thread = threading.Thread(target=stand_still, args=[ending])
    thread.start()

    def after(seconds: float) -> str:
        nonlocal now
        now += seconds
        stall_detector.on_tick()
        return str(capsys.readouterr().err)

    assert after(1000) == "", "no training"
    with stall_detector.training():
        after(59)
        stall_detector.record_step()
        assert after(59) == ""
        line = after(2)
        assert line.startswith(
            "tfkfac: worker 1 at host1:2: no step has ended for 60 s. It is in "
        )
        assert "stand_still (test_watch.py:" in line
        assert after(50) == ""
        assert "for 120 s" in after(10), "again after twice the time"
    assert after(1000) == ""
    ending.set()
    thread.join()


def stand_still(ending: threading.Event) -> None:
    while not ending.is_set():
        time.sleep(0.05)  # `is_set` would be an idle function of threading.py
