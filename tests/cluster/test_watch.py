"""News of other workers, the end of waiting for them, standstills."""

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from tests.support.cluster import run
from tfkfac.cluster import watch as module
from tfkfac.cluster.channel import PEER_EXITED, PEER_LOST
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.watch import (
    Standstill,
    Watch,
    WorkerFailedError,
    describe,
)

CLUSTER = Cluster(("host0:1", "host1:2", "host2:3"), 0)
GONE = tf.errors.UnavailableError(None, None, "a collective has failed")


class FakeChannel:
    index = 0

    def __init__(self) -> None:
        self.said: list[Any] = []

    def broadcast(self, message: Any) -> None:
        self.said.append(message)


class Bench:
    """A watch whose time is a number."""

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
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield Bench(monkeypatch)


def failed(fit: int | None) -> Any:
    return {"failed": "OSError: no disk", "fit": fit}


def test_a_failure_elsewhere_ends_the_wait(bench: Bench) -> None:
    with pytest.raises(WorkerFailedError) as caught, bench.watch.fit():
        bench.watch.on_message(1, failed(1))
        assert bench.after(2.9) == []
        cause = "worker 1 at host1:2 has failed: OSError: no disk"
        assert bench.after(0.2) == [cause]
        assert bench.after(60) == [cause], "once"
        raise GONE
    assert str(caught.value) == cause
    assert caught.value.__context__ is GONE
    assert bench.channel.said == [], "they know"


def test_all_that_come_to_one_end_are_left_alone(bench: Bench) -> None:
    """As where all of them refuse to begin."""
    with pytest.raises(ValueError), bench.watch.fit():
        bench.watch.on_message(1, failed(1))
        raise ValueError("not the same")
    bench.watch.on_message(2, failed(1))
    with bench.watch.fit():
        assert bench.after(60) == []
    assert bench.channel.said == [
        {"failed": "ValueError: not the same", "fit": 1}
    ]
    bench.watch.on_message(1, failed(3))
    assert bench.after(60) == [], "this worker comes to it later"
    with bench.watch.fit():
        assert bench.after(2.9) == []
        assert len(bench.after(0.2)) == 1


@pytest.mark.parametrize("how", [PEER_LOST, PEER_EXITED, failed(None)])
def test_processes_that_end(bench: Bench, how: Any) -> None:
    """Nothing can be done without them, in a `fit` or not."""
    bench.watch.on_message(2, how)
    assert bench.after(2.9) == []
    (cause,) = bench.after(0.2)
    assert cause.startswith("worker 2 at host2:3 ")


def test_what_is_no_fault_of_others_is_told(bench: Bench) -> None:
    error = tf.errors.InvalidArgumentError(
        None,
        None,
        "Graph execution error:\n\nDetected at node x defined at (most recent "
        "call last):\n<stack traces unavailable>\nOSError: no disk\nTraceback "
        '(most recent call last):\n\n  File "x.py", line 3, in f\n\nOSError: '
        "no disk\n\n\t [[{{node PyFunc}}]]",
    )
    with pytest.raises(tf.errors.InvalidArgumentError), bench.watch.fit():
        bench.watch.on_message(1, failed(1))
        raise error
    (said,) = bench.channel.said
    assert said["failed"] == "InvalidArgumentError: OSError: no disk"
    with pytest.raises(SystemExit), bench.watch.fit():
        raise SystemExit(3)
    assert len(bench.channel.said) == 1


def test_a_collective_that_fails_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_PERIOD_S", 0.01)
    with pytest.raises(tf.errors.UnavailableError), bench.watch.fit():
        raise GONE
    assert bench.channel.said[0]["failed"] == describe(GONE)


def test_uncaught_exceptions_are_told(bench: Bench, capsys: Any) -> None:
    error = KeyError("x")
    sys.excepthook(KeyError, error, None)
    assert bench.channel.said == [{"failed": "KeyError: 'x'", "fit": None}]
    assert "KeyError" in capsys.readouterr().err, "and shown"


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("how", [PEER_LOST, PEER_EXITED, failed(None)])
def test_only_a_loss_before_the_first_step_ends_the_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: Any, has_started: bool
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        module.os, "kill", lambda _, number: sent.append(number)
    )
    if has_started:
        with bench.watch.fit():
            pass
    bench.watch.on_message(1, how)
    assert bench.after(4)
    assert not sent  # the error of a collective comes first
    bench.after(4)
    bench.after(4)
    is_ended = how == PEER_LOST and not has_started
    assert sent == ([signal.SIGTERM] if is_ended else [])


def test_two_processes() -> None:
    """One fails in a callback; the other, in a collective, says why."""
    said, others = run("tests.support.workers_strategy:fail", 1, workers=2)
    assert others == ["OSError", "[Errno 28] No space left on device"]
    kind, text = said
    assert kind == "WorkerFailedError"
    assert text.startswith("worker 1 at 127.0.0.1:")
    assert text.endswith("failed: OSError: [Errno 28] No space left on device")


# -------------------------------------------------------------- standstill
def test_workers_are_asked_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    channel = FakeChannel()
    names = [f"worker {i} at host{i}:{i + 1}" for i in range(3)]
    standstill = Standstill(names, channel)  # type: ignore[arg-type]

    def after(seconds: float) -> str:
        nonlocal now
        now += seconds
        standstill.on_tick()
        return str(capsys.readouterr().err)

    assert after(1000) == "", "nobody trains"
    with standstill.training():
        after(59)
        standstill.record_step()
        assert after(59) == "" and channel.said == []
        assert after(2) == "" and channel.said == [{"where": True}]
        standstill.on_message(0, {"place": "is in execute (x.py:1)"})
        standstill.on_message(2, {"place": "is in batches (data.py:7)"})
        assert after(3).splitlines() == [
            "tfkfac: no step has ended for 60 s.",
            "tfkfac: worker 0 at host0:1 is in execute (x.py:1)",
            "tfkfac: worker 1 at host1:2 does not answer",
            "tfkfac: worker 2 at host2:3 is in batches (data.py:7)",
        ]
        assert after(50) == "" and len(channel.said) == 1
        after(10)
        assert len(channel.said) == 2, "and again after twice the time"
        after(3)
    assert after(1000) == ""
    assert len(channel.said) == 2
