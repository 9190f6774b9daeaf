"""Fixtures of the FOSI tests."""

from collections.abc import Iterator

import pytest

from tests.support.dtypes import floats


@pytest.fixture
def double() -> Iterator[None]:
    """Set float64, where results differ by rounding only."""
    with floats("float64"):
        yield
