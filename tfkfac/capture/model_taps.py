"""Taps on methods of a model."""

import abc
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import keras
import tensorflow as tf

from tfkfac.capture.trace import (
    TraceStore,
    capturing,
    current_store,
    replica_id,
    visible_stores,
)
from tfkfac.compat.models import changing_variables, own_value
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


# Calls of a step that are looked at; others, that no step takes, would pile up.
_MOST_CALLS = 32


@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """How a model was called, and what came out of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


class ForwardTap(ModelTap):
    """Notes the calls of a model under a tape.

    A `train_step` may call its model on something else than the `x` that it
    passes to `compute_loss`, or pass no `x` at all.
    """

    method = "call"

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        outputs = below(*args, **kwargs)
        if capturing():
            calls = current_store(self._eager).setdefault(self._key(), [])
            calls.append(ForwardCall(args, kwargs, outputs))
            del calls[:-_MOST_CALLS]
        return outputs

    def take(self) -> list[ForwardCall]:
        """Returns this replica's calls of the current trace."""
        key = self._key()
        calls: list[ForwardCall] = []
        for store in visible_stores(self._eager):
            calls += store.pop(key, [])
        return calls


# Variables of one replica, and their values.
Values = list[tuple[tf.Variable, tf.Tensor]]


class BeforeTap(ModelTap):
    """Notes what a model keeps, before its first call in a training step.

    That is what the call and Keras' `train_step` change whatever comes of the
    step: moving statistics, random seeds, means of losses. Tensors that
    nobody asks for cost nothing.
    """

    method = "call"

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        super().__init__(model)

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        store, key = current_store(self._eager), self._key()
        model = self._model()
        if model is not None and capturing() and key not in store:
            store[key] = read(changing_variables(model))
        try:
            return below(*args, **kwargs)
        except BaseException:
            store.pop(key, None)
            raise

    def look(self) -> Values:
        """Returns what was noted for this replica in the current trace."""
        stores = visible_stores(self._eager)
        found = [store.get(self._key()) for store in stores]
        return next((values for values in found if values), [])

    def take(self) -> Values:
        """Returns the same, and forgets it."""
        values = self.look()
        for store in visible_stores(self._eager):
            store.pop(self._key(), None)
        return values


class MetricsTap(ModelTap):
    """Keeps the batch of a skipped step out of the metrics that follow it.

    Keras' `train_step` ends with `compute_metrics`, which updates those that
    the model was compiled with and returns the results of all.
    """

    method = "compute_metrics"

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        super().__init__(model)

    def note(self, left_out: tf.Variable) -> None:
        """Notes where it says whether this replica's batch is left out.

        Args:
            left_out: Positive if it is.
        """
        current_store(self._eager)[self._key()] = left_out

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        model, key = self._model(), self._key()
        stores = visible_stores(self._eager)
        noted = [s.pop(key) for s in stores if key in s]
        # The mean of the loss alone is not updated here.
        if model is None or not noted or len(model.metrics) < 2:
            return below(*args, **kwargs)
        before = read(model.metrics_variables)
        results = below(*args, **kwargs)

        def without() -> Any:
            put_back(before)
            return model.get_metrics_result()

        return tf.cond(noted[0] > 0, without, lambda: results)


def read(variables: Sequence[keras.Variable]) -> Values:
    """This replica's copies of variables, and their values now."""
    own = [own_value(variable) for variable in variables]
    return [(variable, tf.convert_to_tensor(variable)) for variable in own]


def put_back(values: Values) -> None:
    """Gives variables their values again."""
    for variable, value in values:
        variable.assign(value)
