"""Checks of constructor arguments, and their form in a config."""

import math
import numbers
from typing import Any

import keras

from tfkfac.wrapper.hyperparameters import is_number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"Argument `{name}` must be one of {choices}. "
            f"Received: {name}={value!r}"
        )
    return value


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Returns an integer of at least `least`.

    Raises:
        ValueError: If it is not.
    """
    integral = isinstance(value, numbers.Integral)
    if not integral or isinstance(value, bool) or value < least:
        raise ValueError(
            f"Argument `{name}` must be an integer of at least {least}. "
            f"Received: {name}={value!r}"
        )
    return int(value)


def check_range(
    name: str, value: Any, least: float, below: float = math.inf
) -> float:
    """Returns a number as a float in [least, below).

    Raises:
        ValueError: If it is not.
    """
    if not is_number(value) or not least <= value < below:
        raise ValueError(
            f"Argument `{name}` must be a number in [{least}, {below}). "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_inner(identifier: Any) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer that an argument stands for.

    Raises:
        ValueError: If it is not an optimizer or one that cannot be inside.
    """
    message = (
        "Argument `inner_optimizer` must be a Keras optimizer, its name or "
        "config, or a float learning rate. Received: inner_optimizer="
        f"{identifier!r} (of type {type(identifier)})"
    )
    try:
        inner = keras.optimizers.get(identifier)
    except (ValueError, TypeError) as error:
        raise ValueError(message) from error
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(message)
    wraps = isinstance(inner, keras.optimizers.LossScaleOptimizer)
    if wraps or hasattr(inner, "inner_optimizer"):
        raise ValueError(
            "Argument `inner_optimizer` must be a plain optimizer; put a "
            "`LossScaleOptimizer` around this one, not inside. Received: "
            f"inner_optimizer={inner}"
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            "Argument `inner_optimizer` must not have a `loss_scale_factor`; "
            "put a `LossScaleOptimizer` around this optimizer. Received: "
            f"loss_scale_factor={inner.loss_scale_factor}"
        )
    return inner


def serialize_value(value: Any) -> Any:
    """Serialises a schedule or callable; a number is itself."""
    if value is None or isinstance(value, (int, float)):
        return value
    return keras.saving.serialize_keras_object(value)
