"""FOSI's configs, files and reports."""

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers import SGD, Adam
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.fosi_reference import SIZE, data, fit, loss, mlp, small
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
    assert copy.inner_optimizer.get_config() == SGD(
        0.3, 0.8, True, name="SGD"
    ).get_config() | {"name": copy.inner_optimizer.name}


def test_defaults_and_registration() -> None:
    optimizer = tfkfac.FOSI()
    assert isinstance(optimizer.inner_optimizer, Adam)
    config = optimizer.get_config()
    assert (config["num_largest"], config["num_smallest"]) == (5, 0)
    assert (config["alpha"], config["momentum"]) == (0.1, 0.9)
    for name in ("update_interval", "warmup_steps", "lanczos_steps"):
        assert config[name] is None
    assert (config["layout"], config["seed"]) == ("rows", 0)
    assert config["learning_rate_clip"] == 1.0
    whole = keras.optimizers.serialize(optimizer)
    assert whole["registered_name"] == "tfkfac>FOSI"
    copy = keras.optimizers.deserialize(whole)
    assert copy.get_config() == config


def test_config_of_a_schedule() -> None:
    optimizer = tfkfac.FOSI(
        SGD(ExponentialDecay(0.1, 5, 0.5)), alpha=ExponentialDecay(0.5, 4, 0.9)
    )
    copy = tfkfac.FOSI.from_config(optimizer.get_config())
    assert isinstance(copy.alpha, ExponentialDecay)
    assert copy.alpha.get_config() == optimizer.alpha.get_config()
    assert copy.get_config() == optimizer.get_config()


# --------------------------------------------------------------------- files


def test_what_is_saved() -> None:
    """By name."""
    model = mlp()
    model.compile(small(), loss())
    model.train_on_batch(X, Y)
    names = {key.split(":")[1] for key in curvature(model.optimizer)}
    assert names == {
        "directions",
        "estimations",
        "failures",
        "inner_momentum",
        "largest_rate",
        "last_estimation",
        "momentum",
        "ritz_values",
        "skipped_steps",
        "square",
        "warmup",
    }


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
@pytest.fixture(scope="module")
def trained() -> Any:
    model = mlp()
    model.compile(small(num_smallest=1), loss())
    fit(model, X, Y, 4)
    return model


def test_state_bytes(trained: Any) -> None:
    """Those of the variables, and of the basis; known before training."""
    optimizer = trained.optimizer
    kept = {
        key.split(":")[1]: value for key, value in curvature(optimizer).items()
    }
    own = sum(v.nbytes for v in kept.values() if v.dtype == np.float32)
    want = {"directions": own, "basis": 4 * SIZE * 4}
    want |= {"copies": 0, "counters": 6 * 8}
    want["total"] = sum(want.values())
    assert optimizer.state_bytes() == want
    model = mlp()
    model.compile(small(num_smallest=1), loss())
    assert model.optimizer.state_bytes() == want


def test_communication_bytes(trained: Any) -> None:
    """Nothing moves on one device."""
    report = trained.optimizer.communication_bytes()
    assert set(report) == {"warmup", "plain", "estimation"}
    for kind in report.values():
        assert set(kind) == {
            "gradients",
            "projections",
            "lanczos",
            "directions",
            "weights",
        }
        assert set(kind.values()) == {0}


def test_summary(trained: Any) -> None:
    text = summary_text(trained.optimizer)
    assert "FOSI 'fosi' of model 'mlp'" in text
    assert "SGD on the rest" in text
    rows = dict(
        [cell.strip() for cell in re_cells(line)]
        for line in text.splitlines()
        if len(re_cells(line)) == 2
    )
    assert rows["Weights"] == str(SIZE)
    assert rows["Directions"] == ("2 of largest and 1 of smallest curvature")
    assert rows["Lanczos steps"] == "4"
    assert rows["Estimations"] == "2"
    values = trained.optimizer.spectrum()
    assert len(values) == 3
    assert (np.diff(values) > 0).all()
    assert rows["Ritz values"] == ", ".join(f"{v:.4g}" for v in values)


def re_cells(line: str) -> list[str]:
    """The columns of a line of the table."""
    return [cell for cell in line.strip().split("  ") if cell.strip()]


def test_summary_before_training() -> None:
    model = mlp()
    model.compile(tfkfac.FOSI(num_largest=3), loss())
    text = summary_text(model.optimizer)
    assert "Ritz values" not in text
    assert "0, the first before update 101" in text
    assert "3 of largest and 0 of smallest" in text
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    optimizer = tfkfac.FOSI().attach(unbuilt)
    for report in (optimizer.summary, optimizer.state_bytes):
        with pytest.raises(ValueError, match="is not built"):
            report()
    assert optimizer.spectrum().shape == (0,)


@pytest.mark.parametrize("warmup", [0, 2])
def test_summary_says_when_the_first_estimation_comes(warmup: int) -> None:
    """Until it has come: before the update after those of the warmup."""
    model = mlp()
    model.compile(small(warmup_steps=warmup), loss())
    model.optimizer.build(model.trainable_variables)
    for step in range(warmup + 2):
        text = summary_text(model.optimizer)
        come = len(model.optimizer.spectrum()) > 0
        assert come == (step > warmup)
        assert ("the first" in text) != come
        if not come:
            assert f"0, the first before update {warmup + 1}\n" in text + "\n"
        model.train_on_batch(X, Y)


# -------------------------------------------------------------------- graphs
