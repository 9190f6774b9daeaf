"""The experiments of the papers: their trainings, table and file."""

import csv
import pathlib
from typing import Any

import pytest

import reproduce
from common import session
from experiments import EXPERIMENTS, running


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trainings_can_be_started(name: str, quick: bool) -> None:
    """Distinct arguments, and optimizers that the library takes."""
    experiment = EXPERIMENTS[name]
    tasks = [experiment.training(c, quick) for c in experiment.cases(quick)]
    assert len(set(tasks)) == len(tasks)
    for task in tasks:
        assert (running.EXAMPLES / f"{task.script}.py").exists()
        variant = session.parse_optimizer(task.optimizer)
        session.make_optimizer(variant, 1, {})
        words = dict(zip(*[iter(task.arguments.split())] * 2, strict=False))
        assert int(words.get("--batch-size", 64)) % task.workers == 0


def test_table_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any
) -> None:
    """Of two workers, the second has three times the state."""

    def run(self: Any) -> Any:
        return [
            {
                "evaluations": [{"metric": 0.5}, {"metric": 0.75}],
                "steps_to_target": 3,
                "seconds": [1.0, 2.0, 3.0, 4.0],
                "cpu_seconds": [0.5, 1.0, 1.5, 2.0],
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
