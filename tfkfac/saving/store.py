"""Optimizer state in Keras files, named by layer.

Keras stores an optimizer's variables by position and silently skips all of
them when their number differs. Here each entry is named by its layer and its
place in it, whatever the number of workers and their tasks; a file that does
not fit is an error.
"""

import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.saving.entries import (
    FORMAT,
    FORMAT_SECTION,
    SHARE,
    STATE,
    Entry,
    Piece,
    Pieces,
    format_fault,
    join,
    ranks_to_join,
    split_key,
)

_FORMAT_KEY = f"{FORMAT_SECTION}:version:"
_FORM = re.compile(r"[^:]+:[^:]+:.*", re.DOTALL)
# The number of an automatic name is its end.
_NAME = re.compile(r"(.*?)(?:_(\d+))?", re.DOTALL)
# Entries by (layer path, section), then by name.
Named = dict[tuple[str, str], dict[str, Any]]


def save_state(
    store: MutableMapping[str, Any],
    entries: Mapping[int, Sequence[Entry]],
    replicas: int,
) -> None:
    """Writes the variables of each replica of this process, by rank."""
    write_format(store)
    pieces: Pieces = {
        rank: {entry.key: Piece.of(entry) for entry in own}
        for rank, own in entries.items()
    }
    variables = {
        (rank, entry.key): entry.variable
        for rank, own in entries.items()
        for entry in own
    }
    for key, ranks in ranks_to_join(pieces).items():
        values = {
            rank: np.asarray(variables[rank, key].numpy()) for rank in ranks
        }
        store[key] = join(key, pieces, values, replicas)


def write_format(store: MutableMapping[str, Any]) -> None:
    """Write the format version into a store."""
    store[_FORMAT_KEY] = np.array(FORMAT, np.int64)


def check_format(store: Mapping[str, Any], optimizer: str) -> None:
    """Refuse state in a format that this version does not know.

    Raises:
        ValueError: If the format version is missing or is another one.
    """
    version: Any = "unknown"
    if _FORMAT_KEY in list(store.keys()):
        version = np.asarray(store[_FORMAT_KEY])
    if not np.array_equal(version, FORMAT):
        raise ValueError(
            f"The saved state of optimizer '{optimizer}' "
            f"{format_fault(version)}. Load it with the version of tfkfac that "
            "wrote it."
        )


def why_unreadable(store: Mapping[str, Any]) -> str | None:
    """The reason why `save_state` cannot have written a store, or None."""
    keys = list(store.keys())
    if not all(_FORM.fullmatch(key) for key in keys):
        return "the file is of another optimizer"
    return None


def share_key(process: int, processes: int) -> str:
    """Return the key that marks a store with the state of one process."""
    return f"{SHARE}:{process} of {processes}:"


def find_share(store: Mapping[str, Any]) -> str | None:
    """The mark of a store with the state of one process; None if whole."""
    marks = [key for key in store.keys() if split_key(key)[1] == SHARE]  # noqa: SIM118
    return marks[0] if marks else None


class Saved:
    """State of an optimizer in a file, by part and layer.

    Layers of a subclassed model get new automatic names (`dense_1` for
    `dense`) each time it is created; paths that differ in such numbers only
    are matched in the order of the numbers. `parts` are the optional ones.
    """

    def __init__(self, store: Mapping[str, Any]) -> None:
        self._store = store
        self._keys: Named = {}
        for key in store.keys():  # noqa: SIM118 (a store is no real mapping)
            layer, part, name = split_key(key)
            self._keys.setdefault((layer, part), {})[name] = key
        self.parts = {part for _, part in self._keys} - {
            STATE,
            SHARE,
            FORMAT_SECTION,
        }
        self._paths: dict[str, str] = {}

    def match(
        self, layers: Iterable[str], parts: set[str], optimizer: str
    ) -> None:
        """Finds the layers of the model, for the parts that it has too.

        Raises:
            ValueError: If there are others in the file.
        """
        used = {STATE, *parts}
        saved = {layer for layer, part in self._keys if part in used}
        expected = set(layers)
        theirs, ours = (
            sorted((*_names_and_numbers(path), path) for path in paths)
            for paths in (saved, expected)
        )
        if [names for names, *_ in theirs] != [names for names, *_ in ours]:
            raise ValueError(
                f"The saved state of optimizer '{optimizer}' is of other "
                f"layers. Only in the file: {sorted(saved - expected)}. "
                f"Only in the model: {sorted(expected - saved)}."
            )
        pairs = zip(ours, theirs, strict=True)
        self._paths = {own: their for (*_, own), (*_, their) in pairs}

    def read(self, entry: Entry) -> np.ndarray:
        """The array of the file for an entry.

        Raises:
            Misfit: If it has none or an invalid one.
        """
        named = self._keys.get((self._paths[entry.layer], entry.part), {})

        def read(name: str) -> np.ndarray:
            if name not in named:
                raise Misfit("is not in the file")
            # A tree may hold a number of Python for a scalar.
            try:
                return np.asarray(self._store[named[name]])
            except ValueError as error:
                raise Misfit(f"is no array: {error}") from error

        if entry.name not in named and entry.derive is not None:
            return np.asarray(entry.derive(read))
        value = read(entry.name)
        if not entry.fits(value.shape):
            raise Misfit(
                f"has shape {entry.shape}, and {value.shape} in the file"
            )
        fault = entry.fault(value)
        if fault is not None:
            raise Misfit(fault)
        return value


class Misfit(ValueError):
    """The file has no valid array for an entry; the message has the reason."""


def load_state(
    saved: Saved,
    entries: Mapping[int, Sequence[Entry]],
    replicas: int,
    optimizer: str,
) -> None:
    """Assigns the arrays of a file to variables; to all of them or none.

    The entries are those of each replica of this process, by rank.

    Raises:
        ValueError: If an entry is missing, has another shape or dtype, or
            cannot be right.
    """
    found: list[tuple[tf.Variable, np.ndarray]] = []
    faults: dict[str, dict[str, str]] = {}
    for rank, own in entries.items():
        for entry in own:
            try:
                value = entry.own(saved.read(entry), rank, replicas)
                found.append((entry.variable, value))
            except Misfit as misfit:
                faults.setdefault(entry.layer, {})[entry.name] = str(misfit)
    if faults:
        raise ValueError(
            f"The saved state of optimizer '{optimizer}' does not fit "
            + "; ".join(_describe(layer, faults[layer]) for layer in faults)
        )
    for variable, value in found:
        variable.assign(tf.cast(value, variable.dtype))


def _describe(layer: str, faults: Mapping[str, str]) -> str:
    texts = [f"{name} {fault}" for name, fault in faults.items()]
    return f"layer '{layer}': {', '.join(texts)}"


def _names_and_numbers(path: str) -> tuple[list[str], list[int]]:
    """A path's names without automatic numbers, and these; a first has none."""
    found = [_NAME.fullmatch(name) for name in path.split("/")]
    matches = [match for match in found if match is not None]
    return [m[1] for m in matches], [int(m[2] or 0) for m in matches]
