"""The benchmark of a step: command line, arithmetic, runs of processes."""

import argparse
import json
import pathlib
from typing import Any

import pytest

import benchmark


def test_median_of_each_phase() -> None:
    """Three intervals of four steps, from step 6 on; step 15 is disturbed."""
    by_step = {
        **{6: 1.0, 7: 2.0, 8: 9.0, 9: 4.0},
        **{10: 1.2, 11: 2.2, 12: 9.2, 13: 4.2},
        **{14: 1.1, 15: 70.0, 16: 9.1, 17: 4.1},
    }
    # Steps 8, 12 and 16 have phase 0, then come 9, 10 and 7.
    phases = benchmark.phases(4, 6, list(by_step.values()))
    assert phases == [9.1, 4.1, 1.1, 2.2]


SECONDS = {"sgd": (2.0, 0.0, 0.0), "kfac-inverse": (3.0, 2.0, 8.0)}


class FakeJob:
    """Plain, factor and inverse work add up; each 2nd interval is slow."""

    def __init__(
        self, model: str, variant: str, options: argparse.Namespace
    ) -> None:
        self.costs = SECONDS[variant]
        self.steps = 1
        self.facts: dict[str, int] = {}
        self.first_step = 4.0, sum(self.costs)

    def run(
        self, steps: int, intervals: tuple[int, int]
    ) -> list[tuple[float, float]]:
        numbers = range(self.steps, self.steps + steps)
        self.steps += steps
        self.intervals = intervals
        return [self.time(number) for number in numbers]

    def time(self, step: int) -> tuple[float, float]:
        seconds, *costs = self.costs
        for cost, interval in zip(costs, self.intervals, strict=True):
            seconds += cost * (step % interval == 0)
        is_slow = 100 < step <= 200
        return seconds * (5 if is_slow else 1) / 1e3, seconds / 1e3

    def close(self) -> None:
        pass


def test_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Job", FakeJob)
    words = ["--rounds", "3", "--variants", *SECONDS]
    base, kfac = benchmark.measure("M1", benchmark.parse_arguments(words))
    assert base["mixes"]["(10,100)"]["mean_ms / sgd"] == 1
    cost = kfac["mixes"]["(10,100)"]
    # Of 100 steps all are plain, 10 update factors, 1 updates inverses.
    assert cost["mean_ms"] == pytest.approx((100 * 3 + 10 * 2 + 8) / 100)
    assert cost["mean_ms / sgd"] == pytest.approx(3.28 / 2)
    assert cost["longest_ms"] == pytest.approx(13)
    assert cost["median_ms"] == pytest.approx(3)
    assert cost["steps"] == 300
    cost = kfac["mixes"]["(1,10)"]
    assert cost["mean_ms / sgd"] == pytest.approx((5 + 8 / 10) / 2)
    assert cost["steps"] == 60
    assert kfac["first_step"]["cpu_seconds / sgd"] == 13 / 2


@pytest.mark.slow
def test_a_run(tmp_path: pathlib.Path, capsys: Any) -> None:
    file = tmp_path / "result.json"
    words = ["--models", "mlp-8x2", "--mixes", "1,2", "--rounds", "1"]
    words += ["--batch", "8", "--mode", "fit", "--json", str(file)]
    words += ["--variants", "adam", "kfac-inverse:damping=0.1", "fosi-adam"]
    assert benchmark.main(words) == 0
    assert "kfac-inverse:damping=0.1" in capsys.readouterr().out
    _, kfac, fosi = json.loads(file.read_text())["rows"]
    assert kfac["mixes"]["(1,2)"]["steps"] == 20
    assert fosi["mixes"]["(1,2)"]["mean_ms / adam"] > 0
    # A and G of two layers, and their inverses, in float32.
    assert kfac["state_bytes"] >= 2 * 2 * 4 * (9**2 + 8**2)
