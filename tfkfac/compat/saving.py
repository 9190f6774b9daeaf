"""The ways of saving in which Keras leaves an optimizer's own state out.

`.keras` and `.weights.h5` files ask an optimizer for what it keeps beside its
variables. Models in the old format `.h5` and state trees do not.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import keras
import numpy as np
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving.saving_lib import safe_get_h5_dataset, safe_get_h5_group

# An optimizer's own state by name, None if it is none of ours.
Save = Callable[[Any], Mapping[str, np.ndarray] | None]
# Called with an optimizer and what there is for it, None if there is nothing.
Load = Callable[[Any, Mapping[str, np.ndarray] | None], None]

# Name of that state in a tree and in a file.
KEY = "curvature"


def carry_in_state_trees(save: Save, load: Load) -> None:
    """Lets `get_state_tree` and `set_state_tree` carry an optimizer's state.

    It relies on these being methods of `keras.Model` and on `set_state_tree`
    passing over names in "optimizer_variables" that it does not know.

    Args:
        save: Returns the state of an optimizer.
        load: Gives an optimizer its state.
    """
    get, set_ = keras.Model.get_state_tree, keras.Model.set_state_tree

    @functools.wraps(get)
    def get_state_tree(
        self: keras.Model, value_format: str = "backend_tensor"
    ) -> dict[str, Any]:
        tree: dict[str, Any] = get(self, value_format)
        state = save(self.optimizer)
        if state is not None:
            if value_format == "backend_tensor":
                convert = keras.ops.convert_to_tensor
                state = {name: convert(value) for name, value in state.items()}
            tree["optimizer_variables"][KEY] = dict(state)
        return tree

    @functools.wraps(set_)
    def set_state_tree(self: keras.Model, state_tree: Mapping[str, Any]) -> Any:
        set_(self, state_tree)
        variables = state_tree.get("optimizer_variables")
        if variables is not None:
            load(getattr(self, "optimizer", None), variables.get(KEY))

    keras.Model.get_state_tree = get_state_tree
    keras.Model.set_state_tree = set_state_tree


def carry_in_legacy_files(save: Save, load: Load) -> None:
    """Lets models in `.h5` files carry an optimizer's state.

    It relies on `legacy_h5_format` writing a compiled model's optimizer by its
    `save_optimizer_weights_to_hdf5_group`, on `keras.saving.load_model`
    calling its `load_model_from_hdf5`, and on the two functions by which Keras
    reads a group and a dataset that may be malicious.

    Args:
        save: Returns the state of an optimizer.
        load: Gives an optimizer its state.
    """
    write = legacy_h5_format.save_optimizer_weights_to_hdf5_group
    read = legacy_h5_format.load_model_from_hdf5

    @functools.wraps(write)
    def save_optimizer_weights_to_hdf5_group(
        group: Any, optimizer: Any
    ) -> None:
        write(group, optimizer)
        state = save(optimizer)
        if state is not None:
            own = group.create_group(KEY)
            for name, value in state.items():
                # HDF5 has no bfloat16.
                is_known = value.dtype.kind != "V"
                own[name] = value if is_known else value.astype("float32")

    @functools.wraps(read)
    def load_model_from_hdf5(
        filepath: Any,
        custom_objects: Any = None,
        compile: bool = True,
        safe_mode: bool = True,
    ) -> keras.Model:
        model = read(filepath, custom_objects, compile, safe_mode)
        optimizer = getattr(model, "optimizer", None)
        with h5py.File(filepath, "r") as file:
            load(optimizer, state_in(file))
        return model

    legacy_h5_format.save_optimizer_weights_to_hdf5_group = (
        save_optimizer_weights_to_hdf5_group
    )
    legacy_h5_format.load_model_from_hdf5 = load_model_from_hdf5


def state_in(file: Any) -> Mapping[str, np.ndarray] | None:
    """An optimizer's state in an open file, None if there is none."""
    if KEY not in file:
        return None
    group = safe_get_h5_group(file, KEY)
    return {name: safe_get_h5_dataset(group, name)[()] for name in group}
