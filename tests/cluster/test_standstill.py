"""What is told when no step ends for long."""

import threading
import time
from typing import Any

import pytest

from tfkfac.cluster import standstill as module
from tfkfac.cluster.standstill import Standstill, place

NAMES = [f"worker {i} at host{i}:{i + 1}" for i in range(3)]


class FakeChannel:
    index = 0

    def __init__(self) -> None:
        self.said: list[Any] = []

    def say(self, message: Any) -> None:
        self.said.append(message)

    def report(self, message: Any) -> None:
        self.said.append(message)


def test_workers_are_asked_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    channel = FakeChannel()
    standstill = Standstill(NAMES, channel)  # type: ignore[arg-type]

    def after(seconds: float) -> str:
        nonlocal now
        now += seconds
        standstill.tick()
        return str(capsys.readouterr().err)

    assert after(1000) == "", "nobody trains"
    with standstill.training():
        after(59)
        standstill.moves()
        assert after(59) == "" and channel.said == []
        assert after(2) == "" and channel.said == [{"where": True}]
        standstill.hear(0, {"place": "is in execute (x.py:1)"})
        standstill.hear(2, {"place": "is in batches (data.py:7)"})
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


def test_the_functions_of_all_threads() -> None:
    def waits_for_data() -> None:
        while not done:
            time.sleep(0.01)

    done = False
    thread = threading.Thread(target=waits_for_data)
    thread.start()
    found = place()
    done = True
    thread.join()
    assert "waits_for_data (test_standstill.py:" in found
    assert "place" not in found
