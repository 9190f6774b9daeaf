"""An inner optimizer as an argument, and values in a config."""

import inspect
import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.checks import check_count, is_finite, is_number
from tfkfac.compat.optimizers import parts_of_multi_optimizer

InnerClass = type[keras.optimizers.Optimizer]


def choose_inner(
    inner_optimizer: Any,
    default: InnerClass,
    defaults: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> Any:
    """Returns the inner optimizer that a user means.

    Args:
        inner_optimizer: None, a learning rate for the default (a float or a
            schedule), or whatever else stands for an optimizer.
        default: Class of the default.
        defaults: Its arguments.
        chosen: The user's arguments for the default, None where there are
            none.

    Returns:
        A new optimizer of the default class, or `inner_optimizer` itself.

    Raises:
        ValueError: If a learning rate is not allowed, or if arguments for the
            default come with an optimizer or a second learning rate.
    """
    has_rate = is_rate(inner_optimizer)
    given = {name: v for name, v in chosen.items() if v is not None}
    if inner_optimizer is not None:
        for name, value in given.items():
            if not has_rate or name == "learning_rate":
                raise ValueError(
                    f"Argument `{name}` must be left out with "
                    "`inner_optimizer`, which has its own. Received: "
                    f"{name}={value!r} with "
                    f"inner_optimizer={inner_optimizer!r}"
                )
        if not has_rate:
            return inner_optimizer
        given["learning_rate"] = inner_optimizer
    arguments = {**defaults, **given}
    arguments["learning_rate"] = check_rate(
        "inner_optimizer" if has_rate else "learning_rate",
        arguments["learning_rate"],
    )
    return default(**arguments)


def is_rate(value: Any) -> bool:
    """Whether a first argument is a learning rate, allowed or not."""
    return is_float(value) or isinstance(value, LearningRateSchedule)


def is_float(value: Any) -> bool:
    """Whether a value is a real number and not an integer."""
    return is_number(value) and not isinstance(value, numbers.Integral)


def check_rate(name: str, value: Any) -> Any:
    """Returns a learning rate, a number as Python's float.

    Raises:
        ValueError: If Keras does not allow it.
    """
    if callable(value) and not isinstance(value, type):
        return value
    if not is_float(value) or not is_finite(value) or value < 0:
        raise ValueError(
            f"Argument `{name}` as a learning rate must be a float of at least "
            "0, a `LearningRateSchedule` or a callable. Received: "
            f"{name}={value!r} (of type {type(value)})"
        )
    return float(value)


def refuse_unknown(
    owner: str,
    unknown: Mapping[str, Any],
    default: InnerClass,
    moved: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses the arguments that a constructor does not know.

    Args:
        owner: Name of the class.
        unknown: The arguments, usually none.
        default: Class of the default inner optimizer.
        moved: Where an argument that is gone has its place now.

    Raises:
        ValueError: If one is of inner optimizers.
        TypeError: If one is of nobody.
    """
    for name, value in unknown.items():
        if name in moved:
            raise ValueError(
                f"Argument `{name}` has moved: use "
                f"{moved[name].format(value)}. Received: {name}={value!r}"
            )
        if name == "loss_scale_factor":
            raise ValueError(
                f"Argument `{name}` is neither of {owner} nor of its inner "
                "optimizer: put a `keras.optimizers.LossScaleOptimizer` around "
                f"{owner}. Received: {name}={value!r}"
            )
        if name in inspect.signature(default.__init__).parameters:
            raise ValueError(
                f"Argument `{name}` must be set on the inner optimizer: "
                f"{owner}(keras.optimizers.{default.__name__}(..., "
                f"{name}={value!r})). Received: {name}={value!r}"
            )
        raise TypeError(
            f"{owner}() got an unexpected keyword argument '{name}'. "
            f"Received: {name}={value!r}"
        )


def check_inner(identifier: Any) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer that an argument stands for.

    Raises:
        ValueError: If it is not an optimizer or one that cannot be inside.
    """
    message = (
        "Argument `inner_optimizer` must be a Keras optimizer, its name or "
        "config, or a learning rate: a float (1.0, not 1) or a schedule. "
        f"Received: inner_optimizer={identifier!r} (of type "
        f"{type(identifier)})"
    )
    try:
        inner = keras.optimizers.get(identifier)
    except Exception as error:  # a config may be anything
        raise ValueError(message) from error
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(message)
    why = why_not_inside(inner)
    if why is not None:
        raise ValueError(
            f"Argument `inner_optimizer` must be a plain optimizer: {why} "
            f"Received: inner_optimizer={inner}"
        )
    rate = inner.learning_rate
    if isinstance(rate, keras.Variable) and not is_finite(float(rate.numpy())):
        raise ValueError(
            "Argument `inner_optimizer` must have a finite learning rate. "
            f"Received: inner_optimizer.learning_rate={float(rate.numpy())}"
        )
    return inner


def take_over_accumulation(
    inner: keras.optimizers.Optimizer, steps: Any
) -> int | None:
    """Makes the optimizer around accumulate what the inner one would.

    Args:
        inner: The inner optimizer. It does not accumulate any more.
        steps: The user's own `gradient_accumulation_steps`, or None.

    Returns:
        The number of micro-batches, or None.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is less than 2, if both say one, or if the inner
            optimizer is in use already.
    """
    name = "gradient_accumulation_steps"
    if steps is not None:
        steps = check_count(name, steps, 2)
    own = inner.gradient_accumulation_steps
    if not own:
        return steps
    if steps is not None or inner.built:
        raise ValueError(
            f"Argument `{name}` must be that of one optimizer: pass it here "
            "and not to `inner_optimizer`, or to one that is new. Received: "
            f"{name}={steps} with inner_optimizer.{name}={own}"
        )
    inner.gradient_accumulation_steps = None
    return int(own)


def why_not_inside(inner: keras.optimizers.Optimizer) -> str | None:
    """Why an optimizer cannot be inside another, or None."""
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        return "put the `LossScaleOptimizer` around this one, not inside."
    if parts_of_multi_optimizer(inner) is not None:
        return (
            "a `MultiOptimizer` has no learning rate and no update of its own "
            "for this one to work with."
        )
    if hasattr(inner, "inner_optimizer"):
        return (
            f"{type(inner).__name__} is around another itself. It would get "
            "changed gradients, and only the outermost is bound to the model."
        )
    if inner.loss_scale_factor is not None:
        return (
            "it must not have a `loss_scale_factor`, here "
            f"{inner.loss_scale_factor}; put a `LossScaleOptimizer` around "
            "this one instead."
        )
    return None


def is_registered(function: Any) -> bool:
    """Whether Keras finds a function by a name of its package."""
    name = getattr(function, "__name__", None)
    return name is not None and (
        keras.saving.get_registered_name(function) != name
    )


def serialize_value(name: str, value: Any) -> Any:
    """Serialises an argument: a schedule or callable; a number is itself.

    Of a function that is not registered a file would have the name alone, of a
    lambda code that Keras does not load unless told to.

    Raises:
        ValueError: If it is such a function.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    is_function = callable(value) and not isinstance(
        value, LearningRateSchedule
    )
    if is_function and not is_registered(value):
        raise ValueError(
            f"Argument `{name}` must not be a function of this kind in a model "
            "that is saved with its optimizer: a file cannot hold it. Use a "
            "`keras.optimizers.schedules.LearningRateSchedule`, or a named "
            "function with `keras.saving.register_keras_serializable`; or save "
            "weights alone, as `ChiefBackup` does. "
            f"Received: {name}={value!r}"
        )
    return keras.saving.serialize_keras_object(value)
