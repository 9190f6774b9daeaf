"""The experiments: what they ask for, and what they write."""

import csv

import pytest

import reproduce
from common.optimizers import parse_optimizer
from experiments import EXPERIMENTS, running
from experiments.running import Result, Training

EVALUATION = {"step": 20, "metric": 0.75, "loss": 0.5}


def measured(scale: int = 1) -> dict:
    """What one worker writes."""
    traffic = {"gradients": 10**6, "factors": scale * 10**6}
    return {
        "evaluations": [{**EVALUATION, "metric": 0.5}, EVALUATION],
        "steps_to_target": 3,
        "losses": [2.0, 1.0, 0.5, 0.4],
        "seconds": [1.0, 2.0, 3.0, 4.0],
        "cpu_seconds": [0.5, 1.0, 1.5, 2.0],
        "seconds_by_kind": {"plain": 0.25},
        "updates": [3, 1],
        "state_bytes": {"factors": 10**6, "total": scale * 10**6},
        "communication_bytes": dict.fromkeys(
            ("plain", "factor", "inverse"), traffic
        ),
    }


RESULT = Result([measured(1), measured(3)])


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trainings_can_be_started(name, quick):
    """Each with other arguments, and optimizers that the library takes."""
    experiment = EXPERIMENTS[name]
    tasks = [experiment.task(case, quick) for case in experiment.cases(quick)]
    assert len(set(map(str, tasks))) == len(tasks)
    for training in tasks:
        assert (running.EXAMPLES / f"{training.script}.py").exists()
        parse_optimizer(training.optimizer).make(1, {})
        workers = training.workers
        batch = dict(zip(*[iter(training.arguments)] * 2, strict=False))
        assert int(batch.get("--batch-size", 64)) % workers == 0


@pytest.mark.parametrize("name", ["kaisa-figure-6"])
def test_table_file_and_plot(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Training, "run", lambda self: RESULT)
    reproduce.main([name, "--quick", "--output", str(tmp_path / "new")])
    experiment = EXPERIMENTS[name]
    cases = experiment.cases(True)
    said = capsys.readouterr().out
    assert said.startswith(experiment.source)
    assert said.count("done: ") == len(cases)
    with (tmp_path / "new" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*cases[0], *experiment.measures]
    assert len(rows) == len(cases)
    png = (tmp_path / "new" / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
