"""What the tests of FOSI have in common."""

from collections.abc import Iterator

import pytest

from tests.support.dtypes import floats


@pytest.fixture
def double() -> Iterator[None]:
    """Float64, where the only differences are of rounding."""
    with floats("float64"):
        yield
