"""The ways of saving that leave out what an optimizer keeps by itself."""

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from tests.compat.contracts import contract
from tfkfac.compat.saving import (
    carry_in_state_trees,
    is_saving_legacy_file,
    legacy_state,
    legacy_variables,
)

STATE = {
    "a:b|c": np.arange(6.0).reshape(2, 3),
    "half": np.ones(2, "float16"),
    "count": np.asarray(3),
}


@keras.saving.register_keras_serializable(package="tests")
class Keeping(keras.optimizers.SGD):
    """Keeps a state beside its variables, and notes what it is given."""

    seen: Any = "nothing"

    @property
    def variables(self) -> list[Any]:
        own = legacy_variables(STATE) if is_saving_legacy_file() else []
        return [*self._variables, *own]

    def set_weights(self, weights: Any) -> None:
        self.seen = legacy_state(weights)
        super().set_weights(weights)


def trained(optimizer: Any = "sgd") -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, keras.losses.MeanSquaredError())
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
def test_state_trees() -> None:
    model, loaded = trained(), list[Any]()
    overrides = carry_in_state_trees(model, lambda: STATE, loaded.append)
    for value_format in ("numpy_array", "backend_tensor"):
        tree = model.get_state_tree(value_format)
        model.set_state_tree(tree)
        assert_is_state(loaded.pop())
    model.set_state_tree({"metrics_variables": {}})
    assert not loaded
    model.set_state_tree({"optimizer_variables": {}})
    assert loaded == [{}]
    for one in overrides:
        one.remove()
    assert "curvature" not in model.get_state_tree()["optimizer_variables"]


@contract(
    "compat.saving.legacy_state",
    "`.h5` files are written from `optimizer.variables` and read, dataset by "
    "dataset, into `optimizer.set_weights`.",
)
def test_legacy_files(tmp_path: Path) -> None:
    file = tmp_path / "model.h5"
    model = trained(Keeping())
    assert not is_saving_legacy_file()
    model.save(file)
    loaded = keras.models.load_model(file).optimizer
    assert_is_state(loaded.seen)
    assert int(loaded.iterations) == 1
    loaded.set_weights([np.array(v) for v in loaded.variables])
    assert loaded.seen is None
    model.save(file, include_optimizer=False)
    keras.models.load_model(file)


def test_older_legacy_files(tmp_path: Path) -> None:
    """The state is beside the weights, if there is any."""
    file = tmp_path / "model.h5"
    trained().save(file)
    with h5py.File(file, "a") as opened:
        weights = opened["optimizer_weights"]
        every = [weights[name] for name in weights.attrs["weight_names"]]
        assert legacy_state(every) == {}
        for name, value in STATE.items():
            opened[f"curvature/{name}"] = value
        assert_is_state(legacy_state(every))
