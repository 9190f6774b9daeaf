"""FOSI's configs, files and reports."""

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers import SGD, Adam
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.fosi_reference import SIZE, data, loss, mlp, small
from tests.support.reference import Array
from tests.support.small import curvature, summary_text

X, Y = data()


# ------------------------------------------------------------------- configs
SETTINGS: dict[str, Any] = {
    "num_largest": 4,
    "num_smallest": 3,
    "alpha": 0.25,
    "update_interval": 7,
    "warmup_steps": 5,
    "lanczos_steps": 9,
    "momentum": 0.5,
    "learning_rate_clip": 3.0,
    "layout": "columns",
    "accelerator_fraction": 0.25,
    "final_update": "paper",
    "seed": 11,
    "max_skipped_steps": 6,
    "name": "other",
}


def test_config() -> None:
    """Every argument goes through JSON; the inner optimizer too."""
    optimizer = tfkfac.FOSI(SGD(0.3, 0.8, True), **SETTINGS)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert set(config) == {*SETTINGS, "inner_optimizer"}
    for name, value in SETTINGS.items():
        assert config[name] == value
    copy = tfkfac.FOSI.from_config(config)
    assert copy.get_config() == optimizer.get_config()
    assert isinstance(copy.inner_optimizer, SGD)
    inner = copy.inner_optimizer.get_config()
    assert inner == SGD(0.3, 0.8, True).get_config() | {"name": inner["name"]}


def test_config_of_a_schedule() -> None:
    optimizer = tfkfac.FOSI(alpha=ExponentialDecay(0.5, 4, 0.9))
    whole = keras.optimizers.serialize(optimizer)
    assert whole["registered_name"] == "tfkfac>FOSI"
    copy = keras.optimizers.deserialize(whole)
    assert isinstance(copy.inner_optimizer, Adam)
    assert copy.alpha.get_config() == optimizer.alpha.get_config()
    assert copy.get_config() == optimizer.get_config()


# --------------------------------------------------------------------- files
def test_state_of_other_sizes_is_refused() -> None:
    store: dict[str, Array] = {}
    models = []
    for count in (2, 3):
        model = mlp()
        model.compile(small(num_largest=count), loss())
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    models[0].optimizer.save_own_variables(store)
    with pytest.raises(ValueError, match="does not fit"):
        models[1].optimizer.load_own_variables(store)


# ------------------------------------------------------------------- reports
SAVED = {
    "directions", "estimations", "failures", "inner_momentum", "largest_rate",
    "last_estimation", "momentum", "ritz_values", "skipped_steps", "square",
    "warmup",
}  # fmt: skip


def test_reports() -> None:
    """When the first estimation comes, until it has come; bytes and values."""
    model = mlp()
    model.compile(small(num_smallest=1, warmup_steps=2), loss())
    optimizer = model.optimizer
    before = optimizer.state_bytes()
    optimizer.build(model.trainable_variables)
    for step in range(4):
        text = summary_text(optimizer)
        come = len(optimizer.spectrum()) > 0
        assert come == ("Ritz values" in text) == (step > 2)
        assert ("0, the first before update 3\n" in text + "\n") != come
        model.train_on_batch(X, Y)
    kept = {k.split(":")[1]: v for k, v in curvature(optimizer).items()}
    assert set(kept) == SAVED
    own = sum(v.nbytes for v in kept.values() if v.dtype == np.float32)
    want = {"directions": own, "basis": 4 * SIZE * 4}
    want |= {"copies": 0, "counters": 6 * 8}
    want["total"] = sum(want.values())
    assert optimizer.state_bytes() == before == want
    traffic = optimizer.communication_bytes()
    assert set(traffic) == {"warmup", "plain", "estimation"}
    for kind in traffic.values():  # nothing moves on one device
        assert set(kind.values()) == {0}
    values = optimizer.spectrum()
    assert (np.diff(values) > 0).all()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "FOSI 'fosi' of model 'mlp'" in text
    assert "SGD on the rest" in text
    for line in (
        f"Weights {SIZE}",
        "Directions 2 of largest and 1 of smallest curvature",
        "Lanczos steps 4",
        "Estimations 1",
        f"Ritz values {', '.join(f'{v:.4g}' for v in values)}",
    ):
        assert line in lines
