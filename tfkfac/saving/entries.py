"""What is saved of an optimizer, named by layer, and how it is spread."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# Path separators make groups in an HDF5 file.
_SLASH, _FIELD = "|", ":"
# The part that every file has; a file may be without each of the others.
STATE = "state"
# The part of which a file has one entry if it has what one worker has and not
# all: its name tells which.
SHARE = "share"
# Reads another entry of the same layer, by name.
Read = Callable[[str], np.ndarray]


class Spread(enum.Enum):
    """How a piece of state is spread over the replicas of a job."""

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
        """Whether a file has it of each replica."""
        return self in (Spread.PARTIAL, Spread.EACH)


@dataclasses.dataclass(frozen=True)
class Region:
    """Where in a whole array a replica's part of it begins.

    What a replica has beyond the end of the whole is zero.

    Attributes:
        whole: Shape of the whole.
        start: Index of the first element.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]

    def cut(self, whole: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a replica's part, of a shape."""
        own = whole[self._slices(shape)]
        missing = [
            (0, size - have)
            for size, have in zip(shape, own.shape, strict=True)
        ]
        return np.pad(own, missing)

    def put(self, whole: np.ndarray, part: np.ndarray) -> None:
        """Writes a replica's part into the whole."""
        place = self._slices(part.shape)
        whole[place] = part[tuple(slice(s.stop - s.start) for s in place)]

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
        layer: Path of the layer, empty for what is of the whole model.
        name: What it is of the layer.
        variable: The variable.
        spread: How it is spread over replicas.
        part: The part of the state that it is of. A file has a part as a
            whole or not at all.
        region: Where in the whole the variable is; None is the whole.
        least: The least number that it can hold; None is 0 for integers, and
            any for others.
        is_finite: Whether it has no NaN. With False it may: there are guards
            where it is used.
        derive: Gives its value where a file does not have it; None is an error
            there.
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
    def shape(self) -> tuple[int | None, ...]:
        """Shape of the whole; None is any length."""
        if self.region is not None:
            return self.region.whole
        return tuple(self.variable.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it can be made of an array of a shape, see `own`."""
        stacked = self.spread.is_stacked or self.shape == ()
        if stacked and shape[1:] == self.shape:
            return True
        return len(shape) == len(self.shape) and all(
            want in (None, have)
            for have, want in zip(shape, self.shape, strict=True)
        )

    def own(self, value: np.ndarray, rank: int, replicas: int) -> np.ndarray:
        """What one replica keeps of what a file has.

        Sums of another number of replicas are added up anew; of numbers that
        each replica had for itself, all get the largest.

        Args:
            value: The array, of `shape`, or one of that of each replica.
            rank: The replica.
            replicas: Number of replicas of the job.
        """
        if value.ndim > len(self.shape):
            value = self._of_each(value, rank, replicas)
        elif self.spread is Spread.PARTIAL and rank > 0:
            value = np.zeros_like(value)
        if self.region is None:
            return value
        return self.region.cut(value, tuple(self.variable.shape))

    def _of_each(
        self, values: np.ndarray, rank: int, replicas: int
    ) -> np.ndarray:
        if self.spread.is_stacked and len(values) == replicas:
            return np.asarray(values[rank])
        if self.spread is Spread.PARTIAL:
            return np.asarray(values[rank::replicas].sum(0))
        return np.asarray(values.max(0))

    def fault(self, value: np.ndarray) -> str | None:
        """What is wrong with what a file has, or None."""
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
    """What a replica has of the state to save, and what a file must have.

    Attributes:
        entries: The variables that the replica has.
        layers: Paths of the layers of which any replica has some.
        parts: The parts that a file may be without, and what makes good for
            the lack of each.
        idle: Those that there is no need to save now.
    """

    entries: list[Entry]
    layers: tuple[str, ...] = ()
    parts: Mapping[str, Callable[[], object]] = dataclasses.field(
        default_factory=dict
    )
    idle: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one replica has of an entry.

    Attributes:
        key: Name of the entry in a file.
        shape: Shape of the variable.
        dtype: Name of its dtype.
        is_stacked: Whether a file has it of each replica.
        region: Where in the whole it is; None is the whole.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    is_stacked: bool
    region: Region | None

    @classmethod
    def of(cls, entry: Entry) -> "Piece":
        """What a replica has of an entry."""
        shape = tuple(entry.variable.shape)
        if None in shape:
            shape = entry.variable.numpy().shape
        dtype = tf.as_dtype(entry.variable.dtype).name
        stacked = entry.spread.is_stacked
        return cls(entry.key, shape, dtype, stacked, entry.region)

    def to_json(self) -> list[Any]:
        """The piece as something that JSON can hold."""
        region = self.region and [self.region.whole, self.region.start]
        return [self.key, self.shape, self.dtype, self.is_stacked, region]

    @classmethod
    def from_json(cls, fields: list[Any]) -> "Piece":
        """Inverse of `to_json`."""
        key, shape, dtype, stacked, region = fields
        place = region and Region(tuple(region[0]), tuple(region[1]))
        return cls(key, tuple(shape), dtype, stacked, place)


def split_key(key: str) -> tuple[str, str, str]:
    """Layer path, part and name of an entry in a file."""
    part, name, path = key.split(_FIELD, 2)
    return path.replace(_SLASH, "/"), part, name


def kind_of(dtype: np.dtype) -> str:
    """Kind of a dtype: `f`, `i`, `b`, or NumPy's own for others.

    NumPy knows bfloat16 as some bytes.
    """
    known = {"f": "f", "i": "i", "u": "i", "b": "b"}
    return (
        "f" if dtype.name == "bfloat16" else known.get(dtype.kind, dtype.kind)
    )


def storable(value: np.ndarray) -> np.ndarray:
    """The value in a dtype that NumPy's files know: float32 for bfloat16."""
    return value.astype("float32") if value.dtype.name == "bfloat16" else value
