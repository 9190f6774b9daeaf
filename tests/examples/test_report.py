import csv

import keras
import numpy as np
import pytest

from common.recording import Recorder


class BatchLosses(keras.callbacks.Callback):
    """The loss of each batch at the weights before its step."""

    def __init__(self, batches):
        super().__init__()
        self.batches, self.losses = batches, []

    def on_train_batch_begin(self, batch, logs=None):
        x, y = self.batches[batch]
        error = x @ self.model.weights[0].numpy() - y
        self.losses.append(np.mean(error**2))


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 3)), rng.normal(size=(48, 1))
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, use_bias=False)]
    )
    model.compile("sgd", "mse", metrics=["accuracy"])
    recorder = Recorder()
    recorder.path = tmp_path / "run.csv"
    check = BatchLosses([(x[i : i + 4], y[i : i + 4]) for i in range(0, 48, 4)])
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        callbacks=[recorder, check],
    )
    np.testing.assert_allclose(
        recorder.losses, check.losses, rtol=1e-3, atol=1e-5
    )
    return recorder


def test_recorder(run, tmp_path):
    assert [test.step for test in run.evaluations] == [12, 24]
    durations = np.diff(run.seconds, prepend=0)
    assert (durations > 0).all()
    # The first step traced the graph; that is not counted.
    assert durations[0] == pytest.approx(durations[1:11].max())
    with (tmp_path / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 25))
    assert [int(row["epoch"]) for row in rows] == [1] * 12 + [2] * 12
    assert [bool(row["test_metric"]) for row in rows[10:13]] == [0, 1, 0]
    losses = [float(row["loss"]) for row in rows]
    np.testing.assert_allclose(losses, run.losses, rtol=1e-5)
