"""Arguments of optimizers: hyperparameters, inner optimizer, configs."""

import difflib
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.checks import is_count, is_finite, is_function, is_number
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.optimizers import updates_by_step

Schedule: TypeAlias = float | LearningRateSchedule
# Value of an argument; its type depends on the argument.
Value: TypeAlias = Any


class Hyperparameter:
    """Argument that is a number, a schedule of the iteration or None.

    A number is stored in a variable: a new number takes effect in the next step
    without retracing. A schedule is part of the trace. Floats are float64, and
    are cast where they are used. Integers are at least 1, floats at least 0 or,
    with `positive`, above 0.
    """

    def __init__(
        self,
        name: str,
        value: Value,
        integer: bool = False,
        positive: bool = False,
        optional: bool = False,
    ) -> None:
        self.name = name
        self._integer = integer
        self._positive = positive
        self._optional = optional
        self._built = False
        self._variable: tf.Variable | None = None
        self._schedule: LearningRateSchedule | None = None
        self._value = self._validate(value)

    def get(self) -> Value:
        """Return the value as passed by the user."""
        return self._value

    def set(self, value: Value) -> None:
        """Change the value; once built, only a number to another number."""
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
        """Fix the type of the value before the first trace."""
        if self._built:
            return
        self._built = True
        if is_number(self._value):
            dtype = "int64" if self._integer else "float64"
            value = np.asarray(self._value, dtype)
            self._variable = state_variable(value, dtype, self.name)
        elif isinstance(self._value, LearningRateSchedule):
            self._schedule = schedule = self._value
            # For integers, values in [0, 1) become 1: `iteration // 2` is
            # allowed.
            with tf.init_scope():
                try:
                    zero = tf.constant(0, tf.float64)
                    first = to_float64(schedule(zero)).numpy()
                except Exception as error:  # raised by user code
                    name = type(error).__name__
                    raise self._first_value_error(f"raises {name}") from error
            allowed = not first.shape and (
                is_finite(first.item()) and first >= 0
                if self._integer
                else self._allowed(first.item())
            )
            if not allowed:
                raise self._first_value_error(f"returns {first}")

    def at(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the value at an iteration, as a scalar tensor."""
        if self._variable is not None:
            return tf.convert_to_tensor(self._variable)
        if self._schedule is None:
            raise ValueError(f"Argument `{self.name}` has no value.")
        # Pass float64: float32 is exact only for iterations up to 2^24.
        value = to_float64(self._schedule(tf.cast(iteration, tf.float64)))
        if self._integer:
            return tf.maximum(tf.cast(value, tf.int64), 1)
        return value

    def _first_value_error(self, problem: str) -> ValueError:
        return ValueError(
            f"Argument `{self.name}` must return {self._domain} for every "
            f"iteration. Received: {self.name}={self._value!r}, which "
            f"{problem} for iteration 0"
        )

    @property
    def _domain(self) -> str:
        """Description of the allowed numbers, for messages."""
        if self._integer:
            return "an integer of at least 1"
        return (
            "a positive number" if self._positive else "a number of at least 0"
        )

    def _validate(self, value: Value) -> Value:
        """Check a value and return it, with numbers as Python int or float."""
        if value is None and self._optional:
            return value
        if isinstance(value, LearningRateSchedule):
            return value
        if self._allowed(value):
            return int(value) if self._integer else float(value)
        or_none = " or None" * self._optional
        error = TypeError if is_function(value) else ValueError
        raise error(
            f"Argument `{self.name}` must be {self._domain} or a "
            f"`keras.optimizers.schedules.LearningRateSchedule`{or_none}. "
            f"Received: {self.name}={value!r} (of type {type(value)})"
        )

    def _allowed(self, value: Any) -> bool:
        if self._integer:
            return is_count(value, 1)
        if not is_finite(value):
            return False
        return bool(value > 0 if self._positive else value >= 0)


def to_float64(value: Any) -> tf.Tensor:
    """Convert a number or scalar tensor to float64; Python floats are exact."""
    if is_number(value):
        return tf.constant(value, tf.float64)
    return tf.cast(value, tf.float64)


def interval(name: str, value: Value) -> Hyperparameter:
    """Create an argument that is a number of steps, a schedule or None."""
    return Hyperparameter(name, value, integer=True, optional=True)


def setting(name: str) -> property:
    """Create a property of a setting; only `Hyperparameter`s can change."""

    def get(optimizer: Any) -> Value:
        value = getattr(optimizer.method.settings, name)
        return value.get() if isinstance(value, Hyperparameter) else value

    def set_(optimizer: Any, value: Value) -> None:
        current = getattr(optimizer.method.settings, name)
        if not isinstance(current, Hyperparameter):
            raise AttributeError(
                f"Argument `{name}` cannot be changed: create another "
                f"optimizer. It is {current!r}. Received: {name}={value!r}"
            )
        current.set(value)

    return property(get, set_, doc=f"The argument `{name}`.")


_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
# Arguments of Keras' optimizers that the wrapped optimizers have.
WRAPPED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


def wrapped_setting(name: str) -> property:
    """Create a property with the inner optimizer's value of an argument."""

    def get(optimizer: Any) -> Value:
        return getattr(optimizer.inner_optimizer, name)

    def set_(optimizer: Any, value: Value) -> None:
        # Keras' constructor assigns defaults before the inner optimizer exists.
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None and value != getattr(inner, name):
            refuse_setting(optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`.")


def refuse_setting(optimizer: Any, name: str, value: Value) -> NoReturn:
    """Raise an error for an assigned argument of the inner optimizer."""
    given = f"{name}={value!r}"
    raise AttributeError(
        f"Argument `{name}` of '{optimizer.name}' cannot be assigned. "
        f"{optimizer.wrapped_hint.format(given)} Received: {given}"
    )


def refuse_unknown(cls: Any, arguments: Mapping[str, Value]) -> None:
    """Raise a TypeError for an argument that an optimizer class does not have.

    The message says where arguments of Keras' optimizers belong.
    """
    known = known_arguments(cls)
    unknown = [name for name in arguments if name not in known]
    if not unknown:
        return
    name = unknown[0]
    given = f"{name}={arguments[name]!r}"
    similar = difflib.get_close_matches(name, known, 1, 0.7)
    if name in ("lr", "learning_rate"):
        where = f"Pass the learning rate as `{cls.rate_argument}`."
    elif name == "decay":
        where = "Pass a schedule of `keras.optimizers.schedules` as the rate."
    elif name == "loss_scale_factor":
        where = "Wrap this optimizer in `keras.optimizers.LossScaleOptimizer`."
    elif name in WRAPPED or name in known_arguments(cls.inner_class or object):
        where = cls.wrapped_hint.format(given)
    elif similar:
        where = f"Is it `{similar[0]}`?"
    else:
        where = f"The arguments are: {', '.join(known)}."
    raise TypeError(
        f"{cls.__name__} got an unexpected keyword argument '{name}'. {where} "
        f"Received: {given}"
    )


def known_arguments(cls: Any) -> list[str]:
    """Return the arguments of a constructor, with those it passes to a base."""
    names: list[str] = []
    for owner in cls.__mro__:
        if "__init__" in vars(owner):
            parameters = inspect.signature(owner.__init__).parameters.values()
            kinds = {p.kind for p in parameters}
            names += [p.name for p in parameters if p.kind not in _VARIADIC]
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                break
    return [name for name in dict.fromkeys(names) if name != "self"]


class Settings:
    """Base class of frozen dataclasses of arguments, saved by Keras."""

    def _check(self, name: str, check: Callable[..., Any], *rules: Any) -> None:
        """Replace the field `name` by `check(name, value, *rules)`."""
        object.__setattr__(self, name, check(name, getattr(self, name), *rules))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        serialize = keras.saving.serialize_keras_object
        return {name: serialize(value) for name, value in vars(self).items()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create the object from its config.

        Args:
            config: The result of `get_config`.
        """
        return cls(**{k: restore_value(k, v, None) for k, v in config.items()})


# ----------------------------------------------------- the inner optimizer
def choose_inner(
    inner_optimizer: Any, defaults: Mapping[str, Any], chosen: Mapping[str, Any]
) -> Any:
    """Return the inner optimizer, or create it for None or a learning rate.

    A new optimizer is SGD with the user's `chosen` arguments, and `defaults` in
    place of arguments that are None.
    """
    overrides = {name: v for name, v in chosen.items() if v is not None}
    if inner_optimizer is None:
        rate = overrides.get("learning_rate", defaults["learning_rate"])
        rate = check_rate("learning_rate", rate)
    else:
        has_rate = is_rate(inner_optimizer)
        for name, value in overrides.items():
            if not has_rate or name == "learning_rate":
                raise ValueError(
                    f"Argument `{name}` must be left out with "
                    "`inner_optimizer`, which has its own. Received: "
                    f"{name}={value!r} with inner_optimizer={inner_optimizer!r}"
                )
        if not has_rate:
            return inner_optimizer
        rate = check_rate("inner_optimizer", inner_optimizer)
    arguments = {**defaults, **overrides, "learning_rate": rate}
    return keras.optimizers.SGD(**arguments)


def is_rate(value: Any) -> bool:
    """True if `inner_optimizer` is a learning rate, valid or not."""
    if isinstance(value, LearningRateSchedule):
        return True
    return is_number(value) and not isinstance(value, numbers.Integral)


def check_rate(name: str, value: Any) -> Any:
    """Check a learning rate and return it, with numbers as Python floats."""
    if isinstance(value, LearningRateSchedule):
        return value
    if not is_rate(value) or not is_finite(value) or value < 0:
        error = TypeError if is_function(value) else ValueError
        raise error(
            f"Argument `{name}` as a learning rate must be a float of at least "
            "0 or a `keras.optimizers.schedules.LearningRateSchedule`. "
            f"Received: {name}={value!r} (of type {type(value)})"
        )
    return float(value)


def check_inner(
    identifier: Any, name: str = "inner_optimizer"
) -> keras.optimizers.Optimizer:
    """Return the Keras optimizer for the argument `name`."""
    alternatives = ", or a learning rate: a float (1.0, not 1) or a schedule"
    alternatives *= name == "inner_optimizer"
    message = (
        f"Argument `{name}` must be a Keras optimizer, its name or config"
        f"{alternatives}. "
        f"Received: {name}={identifier!r} (of type {type(identifier)})"
    )
    if is_function(identifier):
        raise TypeError(message)
    try:
        inner = keras.optimizers.get(identifier)
    except Exception as error:  # raised for a wrong config
        raise ValueError(message) from error
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(message)
    reason = reason_not_inner(inner)
    if reason is not None:
        raise ValueError(
            f"Argument `{name}` must be a plain optimizer: {reason} "
            f"Received: {name}={inner}"
        )
    rate = inner.learning_rate
    if isinstance(rate, keras.Variable) and not is_finite(float(rate.numpy())):
        raise ValueError(
            f"Argument `{name}` must have a finite learning rate. "
            f"Received: {name}.learning_rate={float(rate.numpy())}"
        )
    return inner


def take_over_accumulation(
    inner: keras.optimizers.Optimizer, steps: int | None
) -> int | None:
    """Move gradient accumulation from the inner optimizer to this optimizer.

    Returns the number of micro-batches per update; None is 1.
    """
    name = "gradient_accumulation_steps"
    inner_steps = inner.gradient_accumulation_steps
    if not inner_steps:
        return steps
    if steps is not None or inner.built:
        raise ValueError(
            f"Argument `{name}` must be that of one optimizer: pass it here "
            "and not to `inner_optimizer`, or to one that is new. Received: "
            f"{name}={steps} with inner_optimizer.{name}={inner_steps}"
        )
    inner.gradient_accumulation_steps = None
    return int(inner_steps)


def reason_not_inner(inner: keras.optimizers.Optimizer) -> str | None:
    """Return why an optimizer cannot be an inner optimizer, or None."""
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        return "put the `LossScaleOptimizer` around this one, not inside."
    multi_optimizer = getattr(keras.optimizers, "MultiOptimizer", ())
    if isinstance(inner, multi_optimizer):  # new in Keras 3.15
        return (
            "a `MultiOptimizer` has no learning rate and no update of its own "
            "for this one to work with."
        )
    if hasattr(inner, "inner_optimizer"):
        return (
            f"{type(inner).__name__} is around another itself. It would get "
            "changed gradients, and only the outermost is bound to the model."
        )
    if not updates_by_step(inner):
        return (
            f"{type(inner).__name__} does more in an update than its "
            "`update_step`, which is all that one inside does."
        )
    if inner.loss_scale_factor is not None:
        return (
            "it must not have a `loss_scale_factor`, here "
            f"{inner.loss_scale_factor}; put a `LossScaleOptimizer` around "
            "this one instead."
        )
    return None


# ------------------------------------------------------ values in a config
def restore_value(
    name: str, value: Any, custom_objects: dict[str, Any] | None
) -> Any:
    """Restore an argument from its config entry."""
    if not isinstance(value, dict):
        return value
    try:
        return keras.saving.deserialize_keras_object(value, custom_objects)
    except (TypeError, ValueError):
        raise
    except Exception as error:  # raised for a wrong config
        raise ValueError(
            f"Argument `{name}` must be restored from the config of an object "
            f"that Keras knows. Received: {name}={value!r}"
        ) from error
