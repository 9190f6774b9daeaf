"""The command line, which trainings there are, and runs with processes."""

import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import pytest

import time_to_target
from targets import study
from targets.methods import keras_decay
from targets.run import Run


def test_known_results_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second call with more seeds trains these only; all results are kept."""
    file, trained = tmp_path / "study.json", []

    def train(
        runs: Sequence[Run], directory: Any, file: str | None
    ) -> Iterator[dict[str, Any]]:
        for run in runs:
            trained.append(run.seed)
            if run.seed == 13:
                raise study.FailedError("no luck")
            metric = abs(math.log((run.rate or 1.0) / 0.004))  # a loss
            columns = ("step", "seconds", "cpu_seconds", "metric")
            curve = {key: [1.0] for key in columns} | {"metric": [metric]}
            yield {"first_step": 1.0, "curve": curve, "validation": 1.0}

    def call(*seeds: str) -> int:
        words = [
            "--size",
            "tiny",
            "--problem",
            "cnn",
            "--method",
            "adam",
            "--seeds",
        ]
        return time_to_target.main([*words, *seeds, "--json", str(file)])

    monkeypatch.setattr(study, "train", train)
    assert call("0") == 0
    assert trained == [0] * 4
    assert call("0", "1") == 0
    assert {*trained[4:]} == {1}
    assert call("0", "13") == 1
    assert "no luck" in capsys.readouterr().err
    stored = json.loads(file.read_text())
    assert len(stored["runs"]) == 8
    last = stored["environments"][-1]
    assert last["arguments"][-2:] == ["--json", "study.json"]
    assert str(tmp_path) not in file.read_text()


def test_weight_decay_has_an_effective_size() -> None:
    """A rate from 0.1 to 0 in 50 steps takes away a quarter of a weight."""
    steps, rate = 50, 0.1
    schedule = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
    decay = keras_decay(0.25, rate, steps)
    assert decay is not None
    left = math.prod(1 - decay * float(schedule(i)) for i in range(steps))
    assert left == pytest.approx(0.75, rel=0.01)
    assert keras_decay(0.0, rate, steps) is None


OUTSIDE = """\
import keras
import numpy as np

def make(learning_rate, weight_decay):
    assert weight_decay is None
    return keras.optimizers.Lion(learning_rate)
"""


@pytest.mark.slow
def test_a_tiny_study(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes, with an optimizer from outside."""
    file, outside = tmp_path / "study.json", tmp_path / "mine.py"
    outside.write_text(OUTSIDE)
    words = ["--size", "tiny", "--problem", "regression", "--seeds", "0", "1"]
    words += ["--method", "adam", "kfac:rest=adam", "--jobs", "2"]
    words += ["--optimizer", f"{outside}:make", "--rates", "0.01"]
    assert time_to_target.main([*words, "--json", str(file)]) == 0
    records = json.loads(file.read_text())["runs"]
    assert len(records) == 6
    for record in records:
        curve = record["curve"]
        assert curve["step"] == [300] and curve["cpu_seconds"][0] > 0
        assert 0 < curve["metric"][0] < record["validation"] < 0.6
    assert "`mine.py:make=" in capsys.readouterr().out
