"""The ways of saving in which Keras leaves out an optimizer's own state.

`.keras` and `.weights.h5` files ask an optimizer for what it keeps beside its
variables. Models in the old format `.h5` and state trees do not.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import h5py
import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.saving.saving_lib import safe_get_h5_dataset, safe_get_h5_group

from tfkfac.compat.overrides import Override, override

State = Mapping[str, np.ndarray]

# Name of the state in a tree and in a file.
KEY = "curvature"
_WEIGHTS = "optimizer_weights"


@dataclasses.dataclass(frozen=True)
class NamedArray:
    """An array that a `.h5` file takes for a variable, and its dataset."""

    path: str
    value: np.ndarray

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.value, dtype)


def carry_in_state_trees(
    model: keras.Model, save: Callable[[], State], load: Callable[[State], None]
) -> list[Override]:
    """Lets the state trees of a model carry its optimizer's own state.

    `load` gets the state of a tree, which may be none. It relies on
    `set_state_tree` passing over names in "optimizer_variables" that it does
    not know.
    """

    def get_state_tree(
        below: Callable[..., dict[str, Any]],
        value_format: str = "backend_tensor",
    ) -> dict[str, Any]:
        tree = below(value_format)
        state: Mapping[str, Any] = save()
        if value_format == "backend_tensor":
            convert = keras.ops.convert_to_tensor
            state = {name: convert(value) for name, value in state.items()}
        tree["optimizer_variables"][KEY] = dict(state)
        return tree

    def set_state_tree(
        below: Callable[..., Any], state_tree: Mapping[str, Any]
    ) -> None:
        below(state_tree)
        variables = state_tree.get("optimizer_variables")
        if variables is not None:
            load(variables.get(KEY) or {})

    return [
        override(model, "get_state_tree", get_state_tree),
        override(model, "set_state_tree", set_state_tree),
    ]


def is_saving_legacy_file() -> bool:
    """True while Keras writes a model into a `.h5` file.

    It relies on "use_legacy_config" of Keras' global state, and on nobody
    asking an optimizer for its variables under it but what writes them.
    """
    return bool(global_state.get_global_attribute("use_legacy_config", False))


def legacy_variables(state: State) -> list[NamedArray]:
    """State as variables of an optimizer, which a `.h5` file has by path.

    It relies on Keras asking such variables for their `path` and array alone.
    """
    return [
        # HDF5 has no bfloat16.
        NamedArray(
            f"{KEY}/{name}",
            value.astype("float32") if value.dtype.kind == "V" else value,
        )
        for name, value in state.items()
    ]


def legacy_state(weights: Sequence[Any]) -> State | None:
    """The state in a `.h5` file that an optimizer's weights are read from.

    It is empty if the file has none, and None if `weights`, the argument of
    `set_weights`, are of no file. It is with the weights; in older files it is
    beside them.

    It relies on Keras calling an optimizer's `set_weights` with datasets of
    the open file, and on the two functions by which Keras reads a group and a
    dataset that may be malicious.
    """
    if not weights or not isinstance(weights[0], h5py.Dataset):
        return None
    file = weights[0].file
    for place in (safe_get_h5_group(file, _WEIGHTS), file):
        if KEY in place:
            group = safe_get_h5_group(place, KEY)
            return {n: safe_get_h5_dataset(group, n)[()] for n in group}
    return {}
