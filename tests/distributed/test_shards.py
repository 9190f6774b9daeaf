"""Sharded vectors: equal slices, one per worker."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lockstep import run_together
from tests.support.reference import Array
from tfkfac.fosi.layouts import Shards

SIZES = st.integers(1, 60)
WORKERS = st.integers(1, 7)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(0).normal(size=shape)


@given(SIZES, WORKERS)
def test_every_element_has_one_owner(size: int, workers: int) -> None:
    """Slices are equal and as short as possible."""
    shards = Shards(size, workers)
    ranges = [shards.range(worker) for worker in range(workers)]
    assert [i for part in ranges for i in range(size)[part]] == [*range(size)]
    assert shards.length * workers >= size > (shards.length - 1) * workers
    assert all(p.stop - p.start <= shards.length for p in ranges)


@pytest.mark.parametrize(
    "size,workers,ends",
    [
        (8, 4, [2, 4, 6, 8]),
        (9, 4, [3, 6, 9, 9]),  # the last slice is empty
        (1, 4, [1, 1, 1, 1]),
        (7, 1, [7]),
    ],
)
def test_ranges(size: int, workers: int, ends: list[int]) -> None:
    shards = Shards(size, workers)
    assert [shards.range(w).stop for w in range(workers)] == ends


@settings(max_examples=30, deadline=None)
@given(SIZES, WORKERS)
def test_messages(size: int, workers: int) -> None:
    """Slices are padded with zeros; a worker receives the missing slices."""
    shards, wholes = Shards(size, workers), numbers(workers, size)
    longer = np.pad(wholes, [[0, 0], [0, shards.padded_size - size]])
    assert shards.padded_size == workers * shards.length

    def work(group: Any) -> list[Any]:
        own = shards.local_slice(tf.constant(wholes), group.rank)
        slices = [
            shards.local_slice(tf.constant(x), group.rank) for x in longer
        ]
        return [
            own,
            shards.gather(own[0], group),
            shards.gather_all(slices, group),
            shards.reduce(tf.constant(wholes[group.rank]), group),
        ]

    results = run_together(workers, work)
    for rank, ((own, first, every, total), received) in enumerate(results):
        place = rank * shards.length
        want = longer[:, place : place + shards.length]
        np.testing.assert_array_equal(own, want)
        np.testing.assert_array_equal(first, wholes[0])
        np.testing.assert_array_equal(every, longer)
        np.testing.assert_allclose(total, want.sum(0), atol=1e-14)
        assert received == (2 + workers) * shards.length * (workers - 1)
