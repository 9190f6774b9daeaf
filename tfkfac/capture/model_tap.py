"""Taps on a method of one model."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Self

import keras

from tfkfac.capture.trace import TraceStore, replica_id


class ModelTap(abc.ABC):
    """Overrides a method of one model to note what it sees.

    Notes are kept by trace and replica, see `TraceStore`.

    Args:
        model: The model.
    """

    method: ClassVar[str]

    def __init__(self, model: keras.Model) -> None:
        self._eager = TraceStore()
        self._overridden = vars(model).get(self.method)
        override = self._override(getattr(model, self.method))
        object.__setattr__(model, self.method, override)

    @abc.abstractmethod
    def _override(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what takes the place of the method."""

    @classmethod
    def open(cls, model: keras.Model) -> Self:
        """Returns the model's tap, made if need be."""
        tap = vars(model).get(cls._attribute())
        if tap is None:
            tap = cls(model)
            object.__setattr__(model, cls._attribute(), tap)
        return tap

    @classmethod
    def close(cls, model: keras.Model) -> None:
        """Removes the tap."""
        tap = vars(model).get(cls._attribute())
        if tap is None:
            return
        object.__delattr__(model, cls._attribute())
        object.__delattr__(model, cls.method)
        if tap._overridden is not None:
            object.__setattr__(model, cls.method, tap._overridden)

    @classmethod
    def _attribute(cls) -> str:
        return f"_tfkfac_{cls.method}_tap"

    def _key(self) -> tuple[int, int]:
        """This replica's place in a store."""
        return id(self), replica_id()
