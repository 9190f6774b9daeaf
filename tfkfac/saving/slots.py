"""State declared once: its variables, entries, reset and bytes."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfkfac.compat.graphs import Tracked, state_variable
from tfkfac.saving.entries import Entry

_planned = contextvars.ContextVar("planned", default=False)


class Slots(Tracked):
    """A part of the state of a replica, of tensors that `slot` declares.

    Its slots may have fields of their `Entry` in common.
    """

    def __init__(self, name: str, **common: Any) -> None:
        super().__init__(name=name)
        self._declared = _Declared(common)

    def slot(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: Any = "int64",
        value: Any = 0,
        saved: bool = True,
        **fields: Any,
    ) -> tf.Variable:
        """Declares a tensor of the state, and creates its variable.

        Each of its elements is the value at the start, or a function makes all
        of them. Only a saved one is in files, by its name, with some fields
        of its own in its `Entry`.
        """
        declared, dtype = self._declared, tf.as_dtype(dtype)
        declared.bytes += math.prod(shape) * dtype.size
        if _planned.get():
            return None
        with tf.init_scope():
            start = _start(value, shape, dtype)
            variable = state_variable(start, dtype, name)
        declared.starts.append((variable, value))
        if saved:
            given = {"layer": "", **declared.common, **fields}
            entry = Entry(name=name, variable=variable, **given)
            declared.entries.append(entry)
        return variable

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return self._declared.bytes

    @property
    def section(self) -> str:
        """Section of a file that they are in, "" if it has none."""
        return self._declared.common.get("part", "")

    def entries(self) -> list[Entry]:
        """The variables to save."""
        return list(self._declared.entries)

    def reset(self) -> None:
        """Makes all of them what they are at the start."""
        for variable, value in self._declared.starts:
            variable.assign(_start(value, variable.shape, variable.dtype))


def _start(value: Any, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """The elements of a tensor at the start."""
    if callable(value):
        return tf.cast(value(), dtype)
    return tf.fill(list(shape), tf.constant(value, dtype))


class _Declared:
    """The declared slots; a checkpoint does not look into it."""

    def __init__(self, common: dict[str, Any]) -> None:
        self.common = common
        self.bytes = 0
        self.entries: list[Entry] = []
        self.starts: list[tuple[tf.Variable, Any]] = []


@contextlib.contextmanager
def planned() -> Iterator[None]:
    """States that are created in this context have no variables, only bytes."""
    token = _planned.set(True)
    try:
        yield
    finally:
        _planned.reset(token)
