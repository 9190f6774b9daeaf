"""Counts of steps to a loss over the batches, and their chart."""

import json
import pathlib
from typing import Any

import pytest

import large_batches


@pytest.mark.parametrize("first", [8, 64, 2048])
def test_steps_are_interpolated(first: int) -> None:
    """Losses of 100 / steps reach 0.25 after 400 steps."""

    def loss(steps: int, rate: int) -> float:
        return 100 / steps

    counted = large_batches.count(loss, 0.25, first, 0, False)
    assert counted == (pytest.approx(400), 512, 0)
    assert large_batches.count(loss, 1e-9, first, 0, False)[0] is None


def test_the_best_rate_is_searched_for_each_length() -> None:
    """The third rate reaches the target in a sixteenth of the steps."""

    def loss(steps: int, rate: int) -> float:
        return 100 * 4 ** abs(rate - 3) / steps

    counted = large_batches.count(loss, 0.25, 64, 1, True)
    assert counted == (pytest.approx(400), 512, 3)
    assert large_batches.count(loss, 0.25, 64, 1, False)[1] == 8192


@pytest.mark.slow
def test_chart_and_records(
    tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_batches, "BATCHES", (64,))
    monkeypatch.setattr(large_batches, "SEEDS", (0,))
    files = tmp_path / "records.json", tmp_path / "chart.svg"
    words = ["--json", str(files[0]), "--chart", str(files[1])]
    words += ["--problem", "arm", "--optimizer", "kfac"]
    large_batches.main(words)
    [record] = json.loads(files[0].read_text())["records"]
    assert 20 < record["steps"] < 600
    assert "arm: loss 0.01" in files[1].read_text()
    large_batches.main([*words, "--steps", "3"])
    assert "after 3 steps" in capsys.readouterr().out
