"""Comparisons of all weights of a model at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.reference import Array


def distance(a: Sequence[Array], b: Sequence[Array]) -> float:
    squares = [
        np.sum((np.asarray(x, float) - y) ** 2)
        for x, y in zip(a, b, strict=True)
    ]
    return float(np.sqrt(np.sum(squares)))


def assert_same_bits(workers: Sequence[Mapping[str, Any]]) -> None:
    """In the `copies` of all replicas of all workers."""
    first, *others = [copy for w in workers for copy in w["copies"]]
    assert others
    for other in others:
        for got, want in zip(other, first, strict=True):
            np.testing.assert_array_equal(got, want)
