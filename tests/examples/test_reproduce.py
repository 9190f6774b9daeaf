"""The experiments of the papers: their trainings, table and file."""

import csv
import json
import pathlib
from typing import Any

import pytest

import reproduce
from experiments import EXPERIMENTS, running


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trainings_can_be_started(name: str) -> None:
    """Distinct arguments, and optimizers that the library takes."""
    experiment = EXPERIMENTS[name]
    for quick in (True, False):
        tasks = [experiment.training(c, quick) for c in experiment.cases(quick)]
        assert len(set(map(json.dumps, tasks))) == len(tasks)
        assert all(task.batch_size % task.workers == 0 for task in tasks)
    for task in tasks:
        running.make_optimizer(task, 1)


def test_table_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any
) -> None:
    """Of two workers, the second has three times the state."""

    def run(self: Any) -> Any:
        return [
            {
                "metric": 0.75,
                "steps_to_target": 3,
                "seconds": 4.0,
                "cpu_seconds": 2.0,
                "cpu_to_target": 1.5,
                "state_bytes": {"total": scale * 10**6},
                "communication_bytes": {"plain": {"a": 10**6, "b": 10**6}},
            }
            for scale in (1, 3)
        ]

    monkeypatch.setattr(running.Training, "run", run)
    reproduce.main(["dho2-figure-7", "--quick", "--output", str(tmp_path)])
    assert "DHO2" in capsys.readouterr().out
    with (tmp_path / "dho2-figure-7.csv").open() as file:
        row, *_ = csv.DictReader(file)
    assert row == {
        "method": "DHO2",
        "metric": "0.75",
        "steps to target": "3",
        "CPU s to target": "1.5",
        "seconds": "4.0",
    }
    assert running.MEASURES["state, MB"](run(None)) == 3
    assert running.MEASURES["plain step, MB"](run(None)) == 2
