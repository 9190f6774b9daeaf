"""Runs of a tiny model with the optimizers of the command line."""

import json

import keras
import numpy as np
import pytest

import classification
from common.optimizers import parse_optimizer
from common.recording import Recorder
from tests.support import tiny


@pytest.fixture(autouse=True)
def tiny_only(monkeypatch):
    tiny.install(monkeypatch)


def build(text):
    """A tiny model with an optimizer for four steps."""
    keras.utils.set_random_seed(0)
    model = tiny.network(tiny.SHAPE, tiny.CLASSES)
    model.compile(
        parse_optimizer(text).make(4, {}),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(model):
    """Two epochs of two steps."""
    recorder, data = Recorder(), tiny.data()
    model.fit(
        data.train_batches(20, 0),
        epochs=2,
        shuffle=False,
        validation_data=data.test_batches(),
        callbacks=[recorder],
        verbose=0,
    )
    return recorder


FOSI_SETTINGS = ":warmup_steps=2:update_interval=2:num_largest=2"


@pytest.mark.parametrize(
    "name", ["kfac", pytest.param("fosi_adam", marks=pytest.mark.slow), "adamw"]
)
def test_trains(name):
    text, kinds = name, ["plain"] * 3  # without the first step
    if name.startswith("fosi"):
        text += FOSI_SETTINGS
        kinds = ["warmup", "estimation", "plain"]
    if name == "kfac":
        text += ":factor_update_interval=2:inverse_update_interval=3"
        kinds = ["plain", "factor", "inverse"]
    model = build(f"{text}:learning_rate=0.1")
    start = model.get_weights()
    recorder = fit(model)
    assert np.isfinite(recorder.losses).all()
    for before, after in zip(start, model.get_weights(), strict=True):
        assert np.isfinite(after).all()
        assert (before != after).any()
    # It has decayed to 0.
    assert float(np.array(model.optimizer.learning_rate)) == 0
    seconds = recorder.seconds_by_kind
    assert list(seconds) == list(dict.fromkeys(kinds))
    assert [len(x) for x in seconds.values()] == [
        kinds.count(kind) for kind in seconds
    ]


@pytest.mark.slow
def test_comparison(capsys, tmp_path):
    plot, measured = tmp_path / "plots" / "plot.png", tmp_path / "runs.json"
    fosi = "fosi" + FOSI_SETTINGS
    classification.main(
        f"--model mlp --optimizer {fosi} sgd --batch-size 20 --epochs 2 "
        f"--plot {plot} --json {measured} --log-dir {tmp_path}".split()
    )
    said = capsys.readouterr().out
    assert "FOSI 'fosi' of model" in said
    _, kinds = said.split("kind of step")
    assert [line.split()[:3] for line in kinds.split("\n")[2:6]] == [
        [fosi, "warmup", "1"],
        [fosi, "estimation", "1"],
        [fosi, "plain", "1"],
        ["sgd", "plain", "3"],
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sgd.csv").read_text().count("\n") == 1 + 4
    records = json.loads(measured.read_text())
    assert list(records) == [fosi, "sgd"]
    assert len(records["sgd"]["losses"]) == 4
    assert [e["step"] for e in records["sgd"]["evaluations"]] == [2, 4]
    assert records[fosi]["state_bytes"]["total"] > 0
