"""Numbers, schedules and callables as arguments of an optimizer."""

from collections.abc import Callable
from typing import Any, Self, TypeAlias, overload

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.checks import is_count, is_finite, is_number
from tfkfac.compat.graphs import state_variable

# A number, or what gives one for each iteration.
Schedule: TypeAlias = float | LearningRateSchedule | Callable[[Any], Any]
# Of whatever kind an argument allows.
Value: TypeAlias = Any


class Hyperparameter:
    """One argument: a number, a schedule, a callable of the iteration or None.

    A number lives in a variable, so that a new one takes effect in the next
    step without a new trace. A schedule or callable is part of the trace.
    Values are in float64, for models in it; others cast them where they are
    used.

    Args:
        name: Name of the argument, for messages.
        value: The value.
        integer: Whether only integers of at least 1 are allowed.
        positive: Whether 0 is excluded.
        optional: Whether None is allowed.
        also: A class whose instances are allowed too, which somebody else
            gets numbers from.

    Raises:
        ValueError: If the value is not allowed.
    """

    def __init__(
        self,
        name: str,
        value: Value,
        integer: bool = False,
        positive: bool = False,
        optional: bool = False,
        also: type | None = None,
    ) -> None:
        self.name = name
        self._integer = integer
        self._positive = positive
        self._optional = optional
        self._also = also
        self._built = False
        self._variable: tf.Variable | None = None
        self._function: Callable[[Any], Any] | None = None
        self._value = self._validate(value)

    def get(self) -> Value:
        """Returns the value as the user gave it."""
        return self._value

    def set(self, value: Value) -> None:
        """Changes the value.

        Raises:
            ValueError: If it is not allowed, or if what is compiled into the
                training step would have to change.
        """
        value = self._validate(value)
        if self._variable is not None and is_number(value):
            self._variable.assign(value)
        elif self._built:
            raise ValueError(
                f"Argument `{self.name}` is part of the training step: once "
                "the optimizer is built, only a number can be changed, to "
                f"another number. It is {self._value!r}. Received: "
                f"{self.name}={value!r}"
            )
        self._value = value

    def build(self) -> None:
        """Fixes what kind of value it is, before the first trace.

        Raises:
            ValueError: If the first value of a schedule or callable is not
                allowed.
        """
        if self._built:
            return
        self._built = True
        if is_number(self._value):
            dtype = "int64" if self._integer else "float64"
            value = np.asarray(self._value, dtype)
            self._variable = state_variable(value, dtype, self.name)
        elif isinstance(self._value, LearningRateSchedule):
            self._function = self._value
        elif callable(self._value):
            self._function = traced(self._value)
        if self._function is not None:
            self._check_first(self._function)

    def at(self, iteration: tf.Tensor) -> tf.Tensor:
        """Returns the value at an iteration, as a scalar tensor."""
        if self._variable is not None:
            return tf.convert_to_tensor(self._variable)
        if self._function is None:
            raise ValueError(f"Argument `{self.name}` has no value.")
        # As a float, so that a callable can calculate with it; float32 ends
        # to count at 2^24.
        value = exactly(self._function(tf.cast(iteration, tf.float64)))
        if self._integer:
            return tf.maximum(tf.cast(value, tf.int64), 1)
        return value

    def _check_first(self, function: Callable[[Any], Any]) -> None:
        """Checks what a schedule or callable returns for iteration 0."""
        with tf.init_scope():
            try:
                first = exactly(function(tf.constant(0, tf.float64))).numpy()
            except Exception as error:  # a user's function may do anything
                kind = type(error).__name__
                raise self._wrong_value(f"raises {kind}") from error
        if first.shape or not self._in_range(first.item()):
            raise self._wrong_value(f"returns {first}")

    def _wrong_value(self, first: str) -> ValueError:
        return ValueError(
            f"Argument `{self.name}` must return {self._kind} for every "
            f"iteration. Received: {self.name}={self._value!r}, which {first} "
            "for iteration 0"
        )

    def _in_range(self, value: float) -> bool:
        """Whether what a schedule returns is allowed.

        Less than 1 is 1 for an integer, so that `iteration // 2` is allowed.
        """
        if self._integer:
            return is_finite(value) and value >= 0
        return self._allowed(value)

    @property
    def _kind(self) -> str:
        """What values are allowed, for messages."""
        if self._integer:
            return "an integer of at least 1"
        return (
            "a positive number" if self._positive else "a number of at least 0"
        )

    def _validate(self, value: Value) -> Value:
        """Returns an allowed value, a number as Python's own."""
        if value is None and self._optional:
            return value
        if self._also is not None and isinstance(value, self._also):
            return value
        if callable(value) and not isinstance(value, type):
            return value
        if self._allowed(value):
            return int(value) if self._integer else float(value)
        raise ValueError(
            f"Argument `{self.name}` must be {self._kind}, a "
            "`LearningRateSchedule` or a callable of the iteration"
            f"{self._others()}. "
            f"Received: {self.name}={value!r}"
        )

    def _others(self) -> str:
        """What else is allowed, for messages."""
        also = "" if self._also is None else self._also.__name__
        return f" or a `{also}`" * bool(also) + " or None" * self._optional

    def _allowed(self, value: Any) -> bool:
        if self._integer:
            return is_count(value, 1)
        if not is_finite(value):
            return False
        return bool(value > 0 if self._positive else value >= 0)


def traced(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Lets a callable of the iteration use Python's `if`, by AutoGraph.

    It gets the iteration in Keras' float type, which it may mix with tensors
    of that, at least float32.
    """

    @tf.function
    def value(iteration: tf.Tensor) -> tf.Tensor:
        wide = keras.config.floatx() == "float64"
        return exactly(
            function(tf.cast(iteration, tf.float64 if wide else tf.float32))
        )

    return value


def exactly(value: Any) -> tf.Tensor:
    """A number or scalar tensor in float64; a Python float keeps its bits."""
    if is_number(value):
        return tf.constant(value, tf.float64)
    return tf.cast(value, tf.float64)


class Tunable:
    """Declares an argument of a method that can be changed during training.

    Of a method, the attribute is a `Hyperparameter`; the Keras optimizer
    around the method shows its value under the same name. Assigning a value
    checks it.

    Args:
        integer: Whether only integers of at least 1 are allowed.
        positive: Whether 0 is excluded.
        optional: Whether None is allowed.
        also: A class whose instances are allowed too.
    """

    def __init__(
        self,
        integer: bool = False,
        positive: bool = False,
        optional: bool = False,
        also: type | None = None,
    ) -> None:
        self._rules = (integer, positive, optional, also)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Hyperparameter: ...

    def __get__(
        self, instance: object | None, owner: type
    ) -> Self | Hyperparameter:
        if instance is None:
            return self
        hyperparameter: Hyperparameter = vars(instance)[self._name]
        return hyperparameter

    def __set__(self, instance: object, value: Value) -> None:
        known = vars(instance).get(self._name)
        if known is None:
            new = Hyperparameter(self._name, value, *self._rules)
            vars(instance)[self._name] = new
        else:
            known.set(value)
