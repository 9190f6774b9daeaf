"""The experiments of the papers: their trainings."""

import json

import pytest

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
        for optimizer in filter(None, (task.optimizer, task.second)):
            running.make_optimizer(task, optimizer, 1)
