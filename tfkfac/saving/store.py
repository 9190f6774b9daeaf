"""Optimizer state in Keras files, named by layer.

Keras stores an optimizer's variables by position and silently skips all of
them when their number differs. Here each entry bears its place, its layer and
what it is, and a file that does not fit is an error.
"""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

# Path separators make groups in an HDF5 file.
_SLASH, _FIELD = "|", ":"

Named = list[tuple[str, dict[str, tf.Variable]]]


def save_state(store: MutableMapping[str, Any], state: Named) -> None:
    """Writes variables into a Keras store.

    Args:
        store: The store of the optimizer.
        state: Variables by name, of each layer path, in order.
    """
    for index, (path, variables) in enumerate(state):
        for name, variable in variables.items():
            store[_key(index, path, name)] = variable.numpy()


def is_state(store: Mapping[str, Any]) -> bool:
    """Whether a store holds what `save_state` wrote."""
    return all(key.count(_FIELD) >= 2 for key in list(store.keys()))


def load_state(store: Mapping[str, Any], state: Named, optimizer: str) -> None:
    """Reads variables from a Keras store.

    Entries are matched by layer path. Layers of a subclassed model get new
    automatic names (`dense_1` for `dense`) each time it is created; paths that
    differ in such a number only are matched in order.

    Args:
        store: The store of the optimizer, as `save_state` left it.
        state: Variables by name, of each layer path, in order.
        optimizer: The optimizer's name, for messages.

    Raises:
        ValueError: If layers, entries or shapes differ.
    """
    saved = _read(store)
    paths = [path for path, _ in saved]
    expected = [path for path, _ in state]
    by_path = dict(saved)
    if set(paths) != set(expected):
        if [_plain(p) for p in paths] != [_plain(p) for p in expected]:
            raise ValueError(
                f"The saved state of optimizer '{optimizer}' is of other "
                "layers. Only in the file: "
                f"{sorted(set(paths) - set(expected))}. Only in the model: "
                f"{sorted(set(expected) - set(paths))}."
            )
        by_path = dict(
            zip(expected, (entries for _, entries in saved), strict=True)
        )
    for path, variables in state:
        _assign(by_path[path], variables, path, optimizer)


def _assign(
    entries: Mapping[str, Any],
    variables: Mapping[str, tf.Variable],
    path: str,
    optimizer: str,
) -> None:
    have = {name: tuple(np.shape(value)) for name, value in entries.items()}
    want = {name: tuple(v.shape) for name, v in variables.items()}
    if have != want:
        raise ValueError(
            f"The saved state of optimizer '{optimizer}' does not fit layer "
            f"'{path}'. Expected: {want}. In the file: {have}."
        )
    for name, variable in variables.items():
        variable.assign(np.asarray(entries[name]))


def _key(index: int, path: str, name: str) -> str:
    path = path.replace("/", _SLASH)
    return _FIELD.join([f"{index:05d}", name, path])


def _read(
    store: Mapping[str, Any],
) -> list[tuple[str, dict[str, Any]]]:
    """Entries of each layer path, in the order they were written."""
    layers: dict[tuple[str, str], dict[str, Any]] = {}
    for key in sorted(store.keys()):
        index, name, path = key.split(_FIELD, 2)
        path = path.replace(_SLASH, "/")
        layers.setdefault((index, path), {})[name] = store[key]
    return [(path, entries) for (_, path), entries in layers.items()]


def _plain(path: str) -> str:
    """A path without the numbers of automatic names."""
    return "/".join(re.sub(r"_\d+$", "", name) for name in path.split("/"))
