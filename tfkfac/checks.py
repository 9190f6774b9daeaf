"""Checks of argument values."""

import difflib
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_MAX_INT64 = 2**63 - 1


def is_number(value: Any) -> bool:
    """True if a value is a real number and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """True if a value is a finite number in the range of float32."""
    return is_number(value) and bool(abs(value) <= _MAX_FLOAT32)


def is_count(value: Any, least: int = 0) -> bool:
    """True if a value is an integer from `least` to `2**63 - 1`."""
    if not is_number(value) or not isinstance(value, numbers.Integral):
        return False
    return least <= int(value) <= _MAX_INT64


def is_function(value: Any) -> bool:
    """True if a value can be called and is not a class."""
    return callable(value) and not isinstance(value, type)


def if_given(
    check: Callable[..., T], name: str, value: Any, *rules: Any
) -> T | None:
    """Return `check(name, value, *rules)`, or None if `value` is None."""
    return None if value is None else check(name, value, *rules)


def check_choice(
    name: str, value: Any, choices: tuple[str, ...], others: str = ""
) -> str:
    """Return `value` if it is one of `choices`; the error appends `others`."""
    if isinstance(value, str) and value in choices:
        return value
    matches = difflib.get_close_matches(str(value), choices, 1)
    hint = f"Did you mean {matches[0]!r}? " if matches else ""
    raise ValueError(
        f"Argument `{name}` must be one of {choices}{others}. {hint}"
        f"Received: {name}={value!r}"
    )


def check_count(name: str, value: Any, least: int = 0, others: str = "") -> int:
    """Return `value` as an int if it is an integer in [`least`, 2^63).

    The error appends `others`.
    """
    message = (
        f"Argument `{name}` must be an integer of at least {least} and less "
        f"than 2**63{others}. Received: {name}={value!r}"
    )
    if not is_number(value) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{message} (of type {type(value)})")
    if not is_count(value, least):
        raise ValueError(message)
    return int(value)


def check_range(
    name: str, value: Any, least: float, below: float = math.inf
) -> float:
    """Return `value` as a float if it is a number in [`least`, `below`)."""
    if not is_finite(value) or not least <= value < below:
        raise ValueError(
            f"Argument `{name}` must be a number in [{least}, {below}). "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """Return `value` as a float if it is a positive number."""
    if not is_finite(value) or value <= 0:
        raise ValueError(
            f"Argument `{name}` must be a positive number. "
            f"Received: {name}={value!r}"
        )
    return float(value)
