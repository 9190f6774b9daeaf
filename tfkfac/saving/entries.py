"""Entries of saved state, named by layer, and their spread over replicas."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# Path separators make groups in an HDF5 file.
_SLASH, _FIELD = "|", ":"
# The part that every file has; a file may be without each of the others.
STATE = "state"
# The part of the one entry that marks a file with the state of one worker
# alone: its name tells which.
SHARE = "share"
# Reads another entry of the same layer, by name.
Read = Callable[[str], np.ndarray]
# The version of all files of this package, also of backups. A change of what
# they hold needs the next number.
FORMAT = 1
# The section of the one entry that has it.
FORMAT_SECTION = "format"


class Spread(enum.Enum):
    """Ways in which state is spread over the replicas of a job."""

    REPLICATED = "replicated"
    """Every replica has the same."""
    OWNED = "owned"
    """Some replicas have it, the same and whole, or each its own region."""
    PARTIAL = "partial"
    """Each replica has a part of a sum."""
    EACH = "each"
    """Each replica has a number of its own."""

    @property
    def is_stacked(self) -> bool:
        """True if a file has it of each replica."""
        return self in (Spread.PARTIAL, Spread.EACH)


class Region(NamedTuple):
    """Place of a replica's part: shape of the whole, index of the beginning.

    Elements of a part beyond the end of the whole are zero.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]

    def cut(self, whole: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A replica's part, of a shape."""
        own = whole[self._slices(shape)]
        missing = np.subtract(shape, own.shape)
        return np.pad(own, [(0, size) for size in missing])

    def put(self, whole: np.ndarray, local: np.ndarray) -> None:
        """Write a replica's slice into the full array, without the padding."""
        place = self._slices(local.shape)
        whole[place] = local[tuple(slice(s.stop - s.start) for s in place)]

    def _slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        axes = zip(self.start, shape, self.whole, strict=True)
        return tuple(
            slice(min(start, most), min(start + size, most))
            for start, size, most in axes
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variable to save.

    Attributes:
        layer: Path of the layer, empty for state of the whole model.
        name: Name within the layer.
        variable: The variable.
        spread: Its spread over replicas.
        part: The section of the file; a file has a section as a whole or not
            at all.
        region: Place of the variable in the whole; None is the whole.
        least: The least valid number; None is 0 for integers, and any for
            others.
        is_finite: True if it must have no NaN. With False it may: there are
            guards where it is used.
        derive: Computes the value from other entries of the layer, which it
            reads by name. For files of modes in which no worker has this
            entry. None if each file must have the entry.
    """

    layer: str
    name: str
    variable: tf.Variable
    spread: Spread = Spread.REPLICATED
    part: str = STATE
    region: Region | None = None
    least: float | None = None
    is_finite: bool = True
    derive: Callable[[Read], Any] | None = None

    @property
    def key(self) -> str:
        """Name in a file: independent of the other entries."""
        path = self.layer.replace("/", _SLASH)
        return _FIELD.join([self.part, self.name, path])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        if self.region is not None:
            return self.region.whole
        return tuple(self.variable.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if an array of a shape is valid for `own`."""
        stacked = self.spread.is_stacked or self.shape == ()
        return shape == self.shape or (stacked and shape[1:] == self.shape)

    def own(self, value: np.ndarray, rank: int, replicas: int) -> np.ndarray:
        """The value of one replica, from the array of a file.

        That is of `shape`, or stacked by replica. Sums of another number of
        replicas are added up anew; of numbers that each replica had for
        itself, all get the largest.
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
        """The fault of an array from a file, in words; None if it is valid."""
        wanted = np.dtype(self.variable.dtype.as_numpy_dtype)
        kind, own = kind_of(value.dtype), kind_of(wanted)
        if kind != own:
            return f"is of dtype {value.dtype}, not {wanted}"
        if own == "f" and self.is_finite:
            bad = value.size - np.count_nonzero(np.isfinite(value))
            if bad:
                return f"has {bad} of {value.size} numbers that are not finite"
        least = 0 if own == "i" and self.least is None else self.least
        if least is not None and value.size and value.min() < least:
            return f"is {value.min()}, less than {least}"
        return None


@dataclasses.dataclass(frozen=True)
class Contents:
    """State of a replica to save, and the sections that a file must have.

    Attributes:
        entries: The variables of the replica.
        layers: Paths of the layers of which any replica has some.
        optional_sections: Functions that reset a section missing in a file.
    """

    entries: list[Entry]
    layers: tuple[str, ...] = ()
    optional_sections: Mapping[str, Callable[[], object]] = dataclasses.field(
        default_factory=dict
    )


class Piece(NamedTuple):
    """The variable of an entry on one replica, without its value.

    A file has a stacked one of each replica.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    is_stacked: bool
    region: Region | None

    @classmethod
    def of(cls, entry: Entry) -> "Piece":
        """The piece of an entry on this replica."""
        shape = tuple(entry.variable.shape)
        dtype = tf.as_dtype(entry.variable.dtype).name
        stacked = entry.spread.is_stacked
        return cls(entry.key, shape, dtype, stacked, entry.region)

    @classmethod
    def from_json(cls, fields: list[Any]) -> "Piece":
        """A piece of what JSON, which knows no tuples, has made of one."""
        key, shape, dtype, stacked, region = fields
        place = region and Region(*map(tuple, region))
        return cls(key, tuple(shape), dtype, stacked, place)


# The pieces of each replica, by rank and by the entry's name in a file.
Pieces = Mapping[int, Mapping[str, Piece]]


def ranks_to_join(pieces: Pieces) -> dict[str, list[int]]:
    """The replicas whose pieces make the whole of each entry."""
    needed: dict[str, list[int]] = {}
    for rank, own in sorted(pieces.items()):
        for key, piece in own.items():
            ranks = needed.setdefault(key, [])
            if not ranks or piece.is_stacked or piece.region is not None:
                ranks.append(rank)
    return needed


def join(
    key: str,
    pieces: Pieces,
    values: Mapping[int, np.ndarray],
    replicas: int,
) -> np.ndarray:
    """Join the replicas' values of an entry to one array.

    `values` has the ranks of `ranks_to_join`. Several replicas are stacked.
    """
    first, value = next(iter(values.items()))
    piece = pieces[first][key]
    if piece.region is not None:
        whole = np.zeros(piece.region.whole, value.dtype)
        for rank, part in values.items():
            region = pieces[rank][key].region
            assert region is not None
            region.put(whole, part)
        return whole
    if piece.is_stacked and replicas > 1:
        stacked = np.zeros((replicas, *value.shape), value.dtype)
        for rank, part in values.items():
            stacked[rank] = part
        return stacked
    return value


def format_fault(version: Any) -> str:
    """Return the reason why a file of another format cannot be read."""
    return (
        f"was written by format {version}, this version of tfkfac reads format "
        f"{FORMAT}"
    )


def split_key(key: str) -> tuple[str, str, str]:
    """Layer path, part and name of an entry in a file."""
    part, name, path = key.split(_FIELD, 2)
    return path.replace(_SLASH, "/"), part, name


def kind_of(dtype: np.dtype) -> str:
    """NumPy's kind of a dtype, but `i` for unsigned integers too.

    NumPy knows bfloat16 as some bytes.
    """
    if dtype.name == "bfloat16":
        return "f"
    return "i" if dtype.kind == "u" else dtype.kind


def storable(value: np.ndarray) -> np.ndarray:
    """The value in a dtype that NumPy's files know: float32 for bfloat16."""
    return value.astype("float32") if value.dtype.name == "bfloat16" else value
