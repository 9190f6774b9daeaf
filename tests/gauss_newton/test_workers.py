"""Several workers compute the steps of a single process."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest

from tests.support import training
from tests.support.marks import with_slow
from tests.support.training import (
    Result,
    Training,
    assert_same_bits,
    distance,
)
from tfkfac.distributed.collectives import all_reduce_bytes

REGRESSION = Training("GaussNewton", "regression")
CLASSES = Training("GaussNewton", "small", faults=((5, 1, np.nan),))
CASES = {
    "mirrored: regression": REGRESSION,
    "two: classes, NaN": CLASSES,
}


class Record(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(self.model.optimizer.last_step)


def train(case: Training) -> Result:
    model, record = training.build(case), Record()
    start = model.get_weights()
    training.fit(model, case, record)
    states = model.optimizer.method.states
    return training.describe(model) | {
        "start": start,
        "steps": record.steps,
        "dampings": [float(s.damping.numpy()) for s in states],
        "previous": [s.previous.numpy() for s in states],
    }


def common_values(step: Mapping[str, float]) -> dict[str, float]:
    """The entries of `last_step` that are equal on all workers."""
    return {k: v for k, v in step.items() if k != "residuals"}


@pytest.mark.parametrize("name", with_slow(CASES, *[*CASES][1:]))
def test_steps(on_workers: Any, name: str) -> None:
    """Weights, dampings and tries, also with empty batches of a worker."""
    case = CASES[name]
    workers = on_workers(name.partition(":")[0], train, case)
    bad = [step for step, *_ in case.faults]
    single = train(
        Training(
            "GaussNewton",
            case.model,
            feed=case.without_step(*bad).rows if bad else case.feed,
            options={"solve": "parameters"},
        )
    )
    assert_same_bits(workers)
    travelled = distance(single["weights"], single["start"])
    assert travelled > 0.5
    steps = [common_values(step) for step in workers[0]["steps"]]
    for step in bad:  # skipped: `last_step` stays
        del steps[step]
    assert any(step["tries"] > 1 for step in steps)
    for got, want in zip(steps, single["steps"], strict=True):
        assert got == pytest.approx(common_values(want), rel=1e-6, abs=1e-12)
    for worker in workers:
        away = distance(worker["weights"], single["weights"])
        assert away <= 1e-10 * travelled
        assert list(map(common_values, worker["steps"])) == list(
            map(common_values, workers[0]["steps"])
        )
        assert set(worker["dampings"]) == set(workers[0]["dampings"])
        for previous in worker["previous"]:
            np.testing.assert_array_equal(previous, workers[0]["previous"][0])
        assert set(worker["skipped"]) == {len(bad)}
        # J^T J and J^T r have n (n + 3) / 2 scalars.
        size = sum(w.size for w in worker["weights"])
        assert list(worker["communication_bytes"]["plain"].values()) == [
            all_reduce_bytes(8 * n, 2)
            for n in (size, size * (size + 1) // 2, 2, size)
        ]
