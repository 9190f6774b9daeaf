"""Checks of arguments, for every room."""

import math
import numbers
from typing import Any

# The largest numbers that float32 and int64 hold.
_LARGEST = (2 - 2**-23) * 2.0**127
_LARGEST_INTEGER = 2**63 - 1


def is_number(value: Any) -> bool:
    """True if a value is a real number; a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """True if a value is a number that is finite in float32."""
    return is_number(value) and bool(abs(value) <= _LARGEST)


def is_count(value: Any, least: int = 0) -> bool:
    """True if a value is an integer of at least `least` that int64 holds."""
    if not is_number(value) or not isinstance(value, numbers.Integral):
        return False
    return least <= int(value) <= _LARGEST_INTEGER


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


def check_bool(name: str, value: Any) -> bool:
    """Returns `value` if it is a bool.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, bool):
        raise ValueError(
            f"Argument `{name}` must be True or False. Received: "
            f"{name}={value!r}"
        )
    return value


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Returns an integer of at least `least`.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is smaller, or too large for int64.
    """
    message = (
        f"Argument `{name}` must be an integer of at least {least} and less "
        f"than 2**63. Received: {name}={value!r}"
    )
    if not is_number(value) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{message} (of type {type(value)})")
    if not is_count(value, least):
        raise ValueError(message)
    return int(value)


def check_range(
    name: str, value: Any, least: float, below: float = math.inf
) -> float:
    """Returns a number as a float in [least, below).

    Raises:
        ValueError: If it is not.
    """
    if not is_finite(value) or not least <= value < below:
        raise ValueError(
            f"Argument `{name}` must be a number in [{least}, {below}). "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """Returns a positive number as a float.

    Raises:
        ValueError: If it is not.
    """
    if not is_finite(value) or value <= 0:
        raise ValueError(
            f"Argument `{name}` must be a positive number. "
            f"Received: {name}={value!r}"
        )
    return float(value)
