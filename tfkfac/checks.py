"""Checks of arguments, for every room."""

import math
import numbers
from typing import Any


def is_number(value: Any) -> bool:
    """Whether a value is a real number; a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


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
        TypeError: If it is no integer.
        ValueError: If it is smaller.
    """
    integral = isinstance(value, numbers.Integral)
    if not integral or isinstance(value, bool):
        raise TypeError(
            f"Argument `{name}` must be an integer of at least {least}. "
            f"Received: {name}={value!r} (of type {type(value)})"
        )
    if value < least:
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
