"""Turns and arithmetic of a measurement, without processes."""

from typing import Any

import pytest

from benchmarks import measurement
from benchmarks.jobs import Setting
from benchmarks.phases import Mix
from benchmarks.variants import Variant, parse

SECONDS = {"sgd": (2.0, 0.0, 0.0), "kfac-inverse": (3.0, 2.0, 8.0)}


class MadeUpJob:
    """Plain, factor and inverse work add up; each 2nd interval is slow."""

    def __init__(self, model: str, variant: Variant, setting: Setting) -> None:
        self.name = variant.name
        self.steps = 1
        self.intervals = Mix(1, 1)
        self.first_step = {"seconds": 4.0, "cpu_seconds": sum(self.costs)}

    @property
    def costs(self) -> tuple[float, float, float]:
        return SECONDS[self.name]

    def set_intervals(self, factor: int, inverse: int) -> None:
        self.intervals = Mix(factor, inverse)

    def run(self, steps: int) -> list[tuple[float, float]]:
        numbers = range(self.steps, self.steps + steps)
        self.steps += steps
        return [self.time(number) for number in numbers]

    def time(self, step: int) -> tuple[float, float]:
        plain, factor, inverse = self.costs
        seconds = plain
        seconds += factor * (step % self.intervals.factor == 0)
        seconds += inverse * (step % self.intervals.inverse == 0)
        is_slow = 100 < step <= 200
        return seconds * (5 if is_slow else 1) / 1e3, seconds / 1e3

    def facts(self) -> dict[str, Any]:
        return {"peak_bytes": 100 if self.name == "sgd" else 130}

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "Job", MadeUpJob)


def test_mixes() -> None:
    variants = [parse(name) for name in ("sgd", "kfac-inverse")]
    base, kfac = measurement.measure(
        "M1", variants, Setting(), [Mix(10, 100), Mix(1, 10)], 3, 10
    )
    assert base["mixes"]["(10,100)"]["ratio"] == 1
    cost = kfac["mixes"]["(10,100)"]
    # Of 100 steps all are plain, 10 update factors, 1 decomposes.
    assert cost["mean_ms"] == pytest.approx((100 * 3 + 10 * 2 + 8) / 100)
    assert cost["ratio"] == pytest.approx(3.28 / 2)
    assert cost["longest_ms"] == pytest.approx(13)
    assert cost["median_ms"] == pytest.approx(3)
    assert cost["kinds_ms"] == pytest.approx(
        {"plain": 3, "factor": 5, "inverse": 13}
    )
    assert cost["steps"] == 300
    cost = kfac["mixes"]["(1,10)"]
    assert cost["ratio"] == pytest.approx((5 + 8 / 10) / 2)
    assert cost["steps"] == 60
    assert kfac["extra_peak_bytes"] == 30
    assert kfac["first_step_cpu_ratio"] == 13 / 2
