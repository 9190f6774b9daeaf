"""Optimizer state in Keras files, named by layer.

Keras stores an optimizer's variables by position and silently skips all of
them when their number differs. Here each entry is named by its layer, by what
it is of the layer, and by how it is spread over the replicas of a job; a file
that does not fit is an error.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Path separators make groups in an HDF5 file.
_SLASH, _FIELD = "|", ":"
# Entries were numbered before the format had names for everything.
_NUMBERED = re.compile(r"\d{5}:[^:]*:.*", re.DOTALL)


class Spread(enum.Enum):
    """How a piece of state is spread over the replicas of a job."""

    REPLICATED = "replicated"
    """Every replica has the same."""
    OWNED = "owned"
    """Some replicas have it, the same and whole; the others have none."""
    PARTIAL = "partial"
    """Each replica has a part of a sum."""
    ELEMENTS = "elements"
    """Each replica has a slice of the last axis."""
    DIRECTIONS = "directions"
    """Each replica has a slice of the first axis."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variable to save.

    Attributes:
        layer: Path of the layer, empty for what is of the whole model.
        name: What it is of the layer.
        variable: The variable.
        spread: How it is spread over replicas.
    """

    layer: str
    name: str
    variable: tf.Variable
    spread: Spread = Spread.REPLICATED

    @property
    def key(self) -> str:
        """Name in a file: independent of the other entries."""
        path = self.layer.replace("/", _SLASH)
        return _FIELD.join([self.spread.value, self.name, path])


def save_state(
    store: MutableMapping[str, Any], entries: Sequence[Entry]
) -> None:
    """Writes variables into a Keras store.

    Args:
        store: The store of the optimizer.
        entries: The variables.
    """
    for entry in entries:
        store[entry.key] = entry.variable.numpy()


def why_unreadable(store: Mapping[str, Any]) -> str | None:
    """Why a store cannot be what `save_state` wrote, or None."""
    keys = list(store.keys())
    spreads = tuple(f"{spread.value}{_FIELD}" for spread in Spread)
    if all(key.startswith(spreads) for key in keys):
        return None
    if all(_NUMBERED.fullmatch(key) for key in keys):
        return (
            "the file is in the format of an earlier version, which numbered "
            "the entries"
        )
    return "the file is of another optimizer"


def load_state(
    store: Mapping[str, Any], entries: Sequence[Entry], optimizer: str
) -> None:
    """Reads variables from a Keras store.

    Entries are matched by layer path. Layers of a subclassed model get new
    automatic names (`dense_1` for `dense`) each time it is created; paths that
    differ in such numbers only are matched in the order of the numbers.

    Args:
        store: The store of the optimizer, as `save_state` left it.
        entries: The variables.
        optimizer: The optimizer's name, for messages.

    Raises:
        ValueError: If layers, entries or shapes differ.
    """
    saved = _by_layer(_read(store))
    expected = _by_layer([((e.layer, _what(e)), e.variable) for e in entries])
    names = _match(sorted(saved), sorted(expected))
    if names is None:
        raise ValueError(
            f"The saved state of optimizer '{optimizer}' is of other "
            f"layers. Only in the file: {sorted(saved.keys() - expected)}. "
            f"Only in the model: {sorted(expected.keys() - saved)}."
        )
    for path, variables in expected.items():
        _check(saved[names[path]], variables, path, optimizer)
    for path, variables in expected.items():
        for name, variable in variables.items():
            # A tree may hold a number of Python for a scalar.
            value = np.asarray(saved[names[path]][name])
            variable.assign(tf.cast(value, variable.dtype))


def _what(entry: Entry) -> str:
    return f"{entry.name} ({entry.spread.value})"


def _read(store: Mapping[str, Any]) -> list[tuple[tuple[str, str], Any]]:
    """Layer path and name of each entry, and its value."""
    found = []
    for key in store.keys():  # noqa: SIM118 (a store is no real mapping)
        spread, name, path = key.split(_FIELD, 2)
        layer = path.replace(_SLASH, "/")
        found.append(((layer, f"{name} ({spread})"), store[key]))
    return found


def _by_layer(
    named: Sequence[tuple[tuple[str, str], Any]],
) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for (layer, name), value in named:
        layers.setdefault(layer, {})[name] = value
    return layers


def _match(
    saved: Sequence[str], expected: Sequence[str]
) -> dict[str, str] | None:
    """For each path of the model that in the file; None if they differ."""
    if saved == expected:
        return dict(zip(expected, expected, strict=True))
    theirs, ours = (
        sorted(paths, key=lambda p: (_plain(p), _numbers(p)))
        for paths in (saved, expected)
    )
    if [_plain(p) for p in theirs] != [_plain(p) for p in ours]:
        return None
    return dict(zip(ours, theirs, strict=True))


def _check(
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


def _plain(path: str) -> str:
    """A path without the numbers of automatic names."""
    return "/".join(re.sub(r"_\d+$", "", name) for name in path.split("/"))


def _numbers(path: str) -> tuple[int, ...]:
    """The numbers of automatic names in a path; a first one has none."""
    found = [re.search(r"_(\d+)$", name) for name in path.split("/")]
    return tuple(int(match[1]) if match else 0 for match in found)
