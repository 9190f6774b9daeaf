"""The ways of saving that leave out what an optimizer keeps by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

from tests.compat.contracts import contract
from tfkfac.compat.saving import carry_in_legacy_files, carry_in_state_trees

STATE = {
    "a:b|c": np.arange(6.0).reshape(2, 3),
    "half": np.ones(2, "float16"),
    "count": np.asarray(3),
}


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What optimizers are given; Keras is as before afterwards."""
    for name in ("get_state_tree", "set_state_tree"):
        monkeypatch.setattr(keras.Model, name, getattr(keras.Model, name))
    for name in (
        "save_optimizer_weights_to_hdf5_group",
        "load_model_from_hdf5",
    ):
        function = getattr(legacy_h5_format, name)
        monkeypatch.setattr(legacy_h5_format, name, function)
    loaded: list[Any] = []

    def load(optimizer: Any, state: Any) -> None:
        assert optimizer is None or optimizer.built
        loaded.append(state)

    carry_in_state_trees(lambda optimizer: STATE, load)
    carry_in_legacy_files(lambda optimizer: STATE, load)
    yield loaded


def trained() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError())
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    return model


def assert_is_state(found: Any) -> None:
    assert set(found) == set(STATE)
    for name, value in STATE.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)


@contract(
    "compat.saving.carry_in_state_trees",
    "`set_state_tree` passes over names of optimizer variables it knows not.",
)
def test_state_trees(hooked: list[Any]) -> None:
    model = trained()
    for value_format in ("numpy_array", "backend_tensor"):
        model.set_state_tree(model.get_state_tree(value_format))
        assert_is_state(hooked.pop())
    model.set_state_tree({"metrics_variables": {}})
    assert not hooked
    model.set_state_tree({"optimizer_variables": {}})
    assert hooked == [None]


@contract(
    "compat.saving.carry_in_legacy_files",
    "`.h5` files are written and read by two functions of `legacy_h5_format`.",
)
def test_legacy_files(hooked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "model.h5"
    model = trained()
    model.save(file)
    keras.models.load_model(file)
    assert_is_state(hooked.pop())
    model.save(file, include_optimizer=False)
    keras.models.load_model(file)
    assert hooked == [None]
