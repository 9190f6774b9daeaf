"""Optimizer state in Keras files, named by layer.

Keras stores an optimizer's variables by position, and silently skips all of
them when their number differs. Here each entry is named by its layer and its
name within the layer, for any number of workers and any distribution mode. A
file that does not fit is an error.
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
_KEY = re.compile(r"[^:]+:[^:]+:.*", re.DOTALL)
# Groups: a name, and the number that Keras appends to an automatic name.
_NAME = re.compile(r"(.*?)(?:_(\d+))?", re.DOTALL)


def save_state(
    store: MutableMapping[str, Any],
    entries: Mapping[int, Sequence[Entry]],
    replicas: int,
) -> None:
    """Write the state entries of the local replicas to a Keras store."""
    write_format(store)
    pieces: Pieces = {
        rank: {entry.key: Piece.from_entry(entry) for entry in local}
        for rank, local in entries.items()
    }
    variables = {
        (rank, entry.key): entry.variable
        for rank, of_rank in entries.items()
        for entry in of_rank
    }
    for key, ranks in ranks_to_join(pieces).items():
        values = {
            rank: np.asarray(variables[rank, key].numpy()) for rank in ranks
        }
        store[key] = join(key, pieces, values, replicas)


def write_format(store: MutableMapping[str, Any]) -> None:
    """Write the format version into a store."""
    store[_FORMAT_KEY] = np.array(FORMAT, np.int64)


def reason_to_ignore(
    store: Mapping[str, Any], optimizer: str, local_key: str | None
) -> str | None:
    """Return why a file has no state for this process, or None.

    `local_key` is the `worker_key` of this process; None if the model is not
    built.

    Raises:
        ValueError: If this version does not know the format.
    """
    keys = list(store.keys())  # Keras' stores iterate by `keys` only
    if not all(map(_KEY.fullmatch, keys)):
        return "the file is of another optimizer"
    version: Any = "unknown"
    if _FORMAT_KEY in keys:
        version = np.asarray(store[_FORMAT_KEY])
    if not np.array_equal(version, FORMAT):
        raise ValueError(
            f"The saved state of optimizer '{optimizer}' "
            f"{format_fault(version)}. Load it with the version of tfkfac that "
            "wrote it."
        )
    if local_key is None:
        return "the model is not built"
    workers = [key for key in keys if split_key(key)[1] == SHARE]
    if workers not in ([], [local_key]):
        return (
            f"the file has the state of one worker only ({workers[0]}), and "
            "this process is another; the file of worker 0 has all state"
        )
    return None


def worker_key(process: int, processes: int) -> str:
    """Return the key of a store that has the state of only one process."""
    return f"{SHARE}:{process} of {processes}:"


class Saved:
    """State of an optimizer in a file, by section and layer.

    Layers of a subclassed model get new automatic names (`dense_1` for `dense`)
    each time it is created. Paths that differ only in such numbers are matched
    in the order of the numbers. `sections` are the optional sections of the
    file.
    """

    def __init__(self, store: Mapping[str, Any]) -> None:
        self._store = store
        # Keys by (layer path, section), then by name.
        self._keys: dict[tuple[str, str], dict[str, Any]] = {}
        for key in store.keys():  # noqa: SIM118 (a store is no real mapping)
            layer, section, name = split_key(key)
            self._keys.setdefault((layer, section), {})[name] = key
        required = {STATE, SHARE, FORMAT_SECTION}
        self.sections = {section for _, section in self._keys} - required
        self._paths: dict[str, str] = {}

    def match(
        self, layers: Iterable[str], used: set[str], optimizer: str
    ) -> None:
        """Match the layers of the model with those in the `used` sections."""
        saved = {layer for layer, section in self._keys if section in used}
        expected = set(layers)
        in_file, in_model = (
            sorted((*_names_and_numbers(path), path) for path in paths)
            for paths in (saved, expected)
        )
        if [names for names, *_ in in_file] != [
            names for names, *_ in in_model
        ]:
            raise ValueError(
                f"The saved state of optimizer '{optimizer}' is of other "
                f"layers. Only in the file: {sorted(saved - expected)}. "
                f"Only in the model: {sorted(expected - saved)}. To load the "
                "weights alone, call `model.load_weights` before `compile`, or "
                "with `skip_mismatch=True`."
            )
        pairs = zip(in_model, in_file, strict=True)
        self._paths = {path: saved for (*_, path), (*_, saved) in pairs}

    def names(self, section: str) -> set[str]:
        """Return the names of a section's entries for the whole model."""
        return set(self._keys.get(("", section), ()))

    def read(self, entry: Entry) -> np.ndarray:
        """Return the array for an entry, or raise an `EntryError`."""
        keys = self._keys.get((self._paths[entry.layer], entry.section), {})

        def read(name: str) -> np.ndarray:
            if name not in keys:
                raise EntryError("is not in the file")
            # Convert to an array: a dict may contain Python numbers.
            try:
                return np.asarray(self._store[keys[name]])
            except ValueError as error:
                raise EntryError(f"is no array: {error}") from error

        if entry.name not in keys and entry.derive is not None:
            return np.asarray(entry.derive(read))
        value = read(entry.name)
        if not entry.fits(value.shape):
            raise EntryError(
                f"has shape {entry.shape}, and {value.shape} in the file"
            )
        fault = entry.fault(value)
        if fault is not None:
            raise EntryError(fault)
        return value


class EntryError(ValueError):
    """Raised if a file has no valid array for an entry."""


def load_state(
    saved: Saved,
    entries: Mapping[int, Sequence[Entry]],
    replicas: int,
    optimizer: str,
) -> None:
    """Assign the arrays of a file to all variables, or raise a ValueError."""
    values: list[tuple[tf.Variable, np.ndarray]] = []
    faults: dict[str, dict[str, str]] = {}
    for rank, of_rank in entries.items():
        for entry in of_rank:
            try:
                value = entry.local_value(saved.read(entry), rank, replicas)
                values.append((entry.variable, value))
            except EntryError as error:
                faults.setdefault(entry.layer, {})[entry.name] = str(error)
    if faults:
        texts = (
            f"layer '{layer}': {', '.join(map(' '.join, by_name.items()))}"
            for layer, by_name in faults.items()
        )
        raise ValueError(
            f"The saved state of optimizer '{optimizer}' does not fit "
            f"{'; '.join(texts)}"
        )
    for variable, value in values:
        variable.assign(tf.cast(value, variable.dtype))


def _names_and_numbers(path: str) -> tuple[list[str], list[int]]:
    """Split `a/dense_1` into the names (a, dense) and the numbers (0, 1)."""
    optional = [_NAME.fullmatch(name) for name in path.split("/")]
    matches = [match for match in optional if match is not None]
    return [m[1] for m in matches], [int(m[2] or 0) for m in matches]
