"""Taps on a method of one model."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Self

import keras

from tfkfac.capture.trace import TraceStore, replica_id
from tfkfac.compat.overrides import drop_from, keep_on, override


class ModelTap(abc.ABC):
    """Overrides a method of one model to note what it sees.

    Notes are kept by trace and replica, see `TraceStore`.

    Args:
        model: The model.
    """

    method: ClassVar[str]

    def __init__(self, model: keras.Model) -> None:
        self._eager = TraceStore()
        self._installed = override(model, self.method, self._call)

    @abc.abstractmethod
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Takes the place of the method, which is `below`."""

    @classmethod
    def open(cls, model: keras.Model) -> Self:
        """Returns the model's tap, made if need be."""
        return keep_on(model, cls._attribute(), lambda: cls(model))

    @staticmethod
    def close_all(model: keras.Model) -> None:
        """Removes every tap of the model."""
        for kind in ModelTap.__subclasses__():
            kind.close(model)

    @classmethod
    def close(cls, model: keras.Model) -> None:
        """Removes the tap."""
        tap = drop_from(model, cls._attribute())
        if tap is not None:
            tap._installed.remove()

    @classmethod
    def _attribute(cls) -> str:
        return f"_tfkfac_{cls.__name__}"

    def _key(self) -> tuple[int, int]:
        """This replica's place in a store."""
        return id(self), replica_id()
