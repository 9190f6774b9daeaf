"""Declare state tensors: variables, saved entries, initial values."""

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
    """Group of state tensors of a replica, declared by `slot`.

    `common` has fields of `Entry` for all slots. With `saved=False`, no slot is
    in files.
    """

    def __init__(self, name: str, saved: bool = True, **common: Any) -> None:
        super().__init__(name=name)
        self._saved = saved
        self._declared = _Declared(common)

    def slot(
        self,
        name: str,
        shape: Sequence[int | None] = (),
        dtype: Any = "int64",
        value: Any = 0,
        saved: bool = True,
        **fields: Any,
    ) -> tf.Variable:
        """Declare a tensor of the state and create its variable.

        The initial value is a scalar for all elements, or a function that
        returns the tensor. A size of None may change, and is 0 at first.
        `fields` has fields of `Entry` for this slot. Files
        contain slots with `saved`, by name.
        """
        declared, dtype = self._declared, tf.as_dtype(dtype)
        sizes = [size or 0 for size in shape]
        declared.bytes += math.prod(sizes) * dtype.size
        if _planned.get():
            return None
        with tf.init_scope():
            initial = _initial(value, sizes, dtype)
            variable = state_variable(initial, dtype, name, shape)
        declared.initial_values.append((variable, value))
        if saved and self._saved:
            fields = {"layer": "", **declared.common, **fields}
            entry = Entry(name=name, variable=variable, **fields)
            declared.entries.append(entry)
        return variable

    @property
    def bytes(self) -> int:
        """Bytes of all declared tensors."""
        return self._declared.bytes

    @property
    def section(self) -> str:
        """Section of the file that has these slots; "" without a section."""
        return self._declared.common.get("section", "")

    def entries(self) -> list[Entry]:
        """Return the entries of the variables to save."""
        return list(self._declared.entries)

    def reset(self) -> None:
        """Reset all variables to their initial values."""
        for variable, value in self._declared.initial_values:
            shape: Any = variable.shape
            if not shape.is_fully_defined():
                shape = tf.shape(variable)
            variable.assign(_initial(value, shape, variable.dtype))


def _initial(value: Any, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Return the initial value of a tensor."""
    if callable(value):
        return tf.cast(value(), dtype)
    return tf.fill(shape, tf.constant(value, dtype))


class _Declared:
    """Declared slots; a plain object, so checkpoints do not track it."""

    def __init__(self, common: dict[str, Any]) -> None:
        self.common = common
        self.bytes = 0
        self.entries: list[Entry] = []
        self.initial_values: list[tuple[tf.Variable, Any]] = []


@contextlib.contextmanager
def planned() -> Iterator[None]:
    """Context in which `slot` counts bytes and creates no variables."""
    token = _planned.set(True)
    try:
        yield
    finally:
        _planned.reset(token)
