"""Entries of saved state, named by layer, and their spread over replicas."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# `_SLASH` replaces "/" in keys: HDF5 would create a group at each "/".
_SLASH, _FIELD = "|", ":"
# Section that every file has. All other sections are optional.
STATE = "state"
# Section that marks a file of one worker's state; its entry names the worker.
SHARE = "share"
# Reads another entry of the same layer, by name.
Read = Callable[[str], np.ndarray]
# Format version of all files, including backups. Increase the version with each
# change of the format.
FORMAT = 2
FORMAT_SECTION = "format"  # section of the entry with the version


class Spread(enum.Enum):
    """Ways in which state is spread over the replicas of a job."""

    REPLICATED = "replicated"  # all replicas have the same value
    OWNED = "owned"  # some replicas have the whole value, or each a region
    PARTIAL = "partial"  # each replica has a term of a sum
    EACH = "each"  # each replica has a different number

    @property
    def is_stacked(self) -> bool:
        """True if a file stacks the values of all replicas."""
        return self in (Spread.PARTIAL, Spread.EACH)


class Region(NamedTuple):
    """Slice of an array on a replica: shape of the array, and first indices.

    The slice is zero-padded beyond the end of the array.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]

    def cut(self, whole: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the slice of a replica, padded to a shape."""
        local = whole[self._slices(shape)]
        padding = np.subtract(shape, local.shape)
        return np.pad(local, [(0, size) for size in padding])

    def put(self, whole: np.ndarray, local: np.ndarray) -> None:
        """Write a replica's slice into the full array, without the padding."""
        slices = self._slices(local.shape)
        whole[slices] = local[tuple(slice(s.stop - s.start) for s in slices)]

    def _slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        axes = zip(self.start, shape, self.whole, strict=True)
        return tuple(
            slice(min(start, length), min(start + size, length))
            for start, size, length in axes
        )


class Row:
    """View of one row of a variable, for entries and events."""

    def __init__(self, rows: tf.Variable, index: int) -> None:
        self._rows = rows
        self._index = index
        self.shape, self.dtype = rows.shape[1:], rows.dtype

    def numpy(self) -> Any:
        """Return the value of the row as a NumPy array or scalar."""
        return self._rows[self._index].numpy()

    def assign(self, value: tf.Tensor) -> None:
        """Assign a value to the row."""
        self._rows[self._index].assign(value)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Variable to save, with its name and layout in a file."""

    layer: str  # path of the layer, empty for state of the whole model
    name: str  # name within the layer
    variable: tf.Variable | Row
    spread: Spread = Spread.REPLICATED
    section: str = STATE  # a file has all entries of a section or none
    region: Region | None = None  # slice of the saved array; None for all
    # Smallest valid number; None for 0 (integers) and no limit (floats).
    least: float | None = None
    is_finite: bool = True  # True to reject values that are not finite
    # Computes the value from other entries of the layer, for files without this
    # entry. None if the file must contain the entry.
    derive: Callable[[Read], Any] | None = None

    @property
    def key(self) -> str:
        """Name of the entry in a file."""
        path = self.layer.replace("/", _SLASH)
        return _FIELD.join([self.section, self.name, path])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the saved array of a replica."""
        if self.region is not None:
            return self.region.whole
        if not self.variable.shape.is_fully_defined():
            return tuple(self.variable.numpy().shape)
        return tuple(self.variable.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if `local_value` accepts an array of this shape."""
        fits = self.variable.shape.is_compatible_with
        if self.region is not None:
            fits = tf.TensorShape(self.region.whole).is_compatible_with
        stacked = self.spread.is_stacked or self.shape == ()
        return fits(shape) or (stacked and fits(shape[1:]))

    def local_value(
        self, value: np.ndarray, rank: int, replicas: int
    ) -> np.ndarray:
        """Return the value of a replica, given the array of a file.

        The array has the shape `shape`, or is stacked by replica. If the file
        is of another number of replicas, terms of a sum are added; for other
        values each replica gets the maximum.
        """
        is_sum = self.spread is Spread.PARTIAL
        if value.ndim <= len(self.shape):
            value = np.zeros_like(value) if is_sum and rank > 0 else value
        elif self.spread.is_stacked and len(value) == replicas:
            value = value[rank]
        else:
            value = value[rank::replicas].sum(0) if is_sum else value.max(0)
        if self.region is None:
            return np.asarray(value)
        return self.region.cut(value, tuple(self.variable.shape))

    def fault(self, value: np.ndarray) -> str | None:
        """Return why an array from a file is invalid; None if it is valid."""
        dtype = np.dtype(self.variable.dtype.as_numpy_dtype)
        expected = dtype_kind(dtype)
        if dtype_kind(value.dtype) != expected:
            return f"is of dtype {value.dtype}, not {dtype}"
        if expected == "f" and self.is_finite:
            bad = value.size - np.count_nonzero(np.isfinite(value))
            if bad:
                return f"has {bad} of {value.size} numbers that are not finite"
        least = 0 if expected == "i" and self.least is None else self.least
        if least is not None and value.size and value.min() < least:
            return f"is {value.min()}, less than {least}"
        return None


@dataclasses.dataclass(frozen=True)
class Contents:
    """State of a replica to save, and the sections that a file must have."""

    entries: list[Entry]
    # Paths of the layers for which any replica has state.
    layers: tuple[str, ...] = ()
    # For each optional section, a function that resets it if the file does not
    # contain it.
    optional_sections: Mapping[str, Callable[[], object]] = dataclasses.field(
        default_factory=dict
    )


class Piece(NamedTuple):
    """Description of an entry's variable on one replica, without its value.

    The file has an additional axis of all replicas if `is_stacked`.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    is_stacked: bool
    region: Region | None

    @classmethod
    def from_entry(cls, entry: Entry) -> "Piece":
        """Return the piece of an entry on this replica."""
        variable, region = entry.variable, entry.region
        shape = entry.shape if region is None else tuple(variable.shape)
        dtype = tf.as_dtype(variable.dtype).name
        return cls(entry.key, shape, dtype, entry.spread.is_stacked, region)


# Pieces of all replicas, by rank and by the name of the entry in a file.
Pieces = Mapping[int, Mapping[str, Piece]]


def ranks_to_join(pieces: Pieces) -> dict[str, list[int]]:
    """Return the ranks whose pieces `join` needs, for each entry."""
    needed: dict[str, list[int]] = {}
    for rank, by_key in sorted(pieces.items()):
        for key, piece in by_key.items():
            ranks = needed.setdefault(key, [])
            if not ranks or piece.is_stacked or piece.region is not None:
                ranks.append(rank)
    return needed


def join(
    key: str, pieces: Pieces, values: Mapping[int, np.ndarray], replicas: int
) -> np.ndarray:
    """Join the values of an entry on `ranks_to_join` to one array."""
    first, value = next(iter(values.items()))
    piece = pieces[first][key]
    if piece.region is not None:
        whole = np.zeros(piece.region.whole, value.dtype)
        for rank, local in values.items():
            region = pieces[rank][key].region
            assert region is not None
            region.put(whole, local)
        return whole
    if piece.is_stacked and replicas > 1:
        stacked = np.zeros((replicas, *value.shape), value.dtype)
        for rank, local in values.items():
            stacked[rank] = local
        return stacked
    return value


def format_fault(version: Any) -> str:
    """Return the reason why a file of another format cannot be read."""
    return (
        f"was written by format {version}, this version of tfkfac reads format "
        f"{FORMAT}"
    )


def split_key(key: str) -> tuple[str, str, str]:
    """Return the layer path, section and name of an entry in a file."""
    section, name, path = key.split(_FIELD, 2)
    return path.replace(_SLASH, "/"), section, name


def dtype_kind(dtype: np.dtype) -> str:
    """Return NumPy's kind of a dtype; "i" if unsigned, "f" for bfloat16."""
    if dtype.name == "bfloat16":
        return "f"
    return "i" if dtype.kind == "u" else dtype.kind


def storable(value: np.ndarray) -> np.ndarray:
    """Convert bfloat16, which NumPy's files cannot hold, to float32."""
    return value.astype("float32") if value.dtype.name == "bfloat16" else value
