"""Parameters of tests, of which some are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[str], *slow: str) -> list[Any]:
    """All cases; those that repeat what the others have are marked slow."""
    cases = list(cases)
    assert set(slow) <= set(cases)
    return [
        pytest.param(case, marks=pytest.mark.slow if case in slow else ())
        for case in cases
    ]
