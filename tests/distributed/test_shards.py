"""Sharded vectors: equal slices, one per worker."""

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lockstep import run_together
from tfkfac.fosi.layouts import Shards

SIZES = st.integers(1, 60)
WORKERS = st.integers(1, 7)


@given(SIZES, WORKERS)
def test_every_element_has_one_owner(size: int, workers: int) -> None:
    """Slices are equal and as short as possible; the last may be empty."""
    shards = Shards(size, workers)
    assert shards.length * workers >= size > (shards.length - 1) * workers
    whole = [*range(size)]
    for worker in range(workers):
        first = worker * shards.length
        want = whole[first : first + shards.length]
        assert whole[shards.local_range(worker)] == want


@settings(max_examples=30, deadline=None)
@given(SIZES, WORKERS)
def test_messages(size: int, workers: int) -> None:
    """Slices are padded with zeros; a worker receives the missing slices."""
    shards = Shards(size, workers)
    wholes = np.random.default_rng(0).normal(size=(workers, size))
    longer = np.pad(wholes, [[0, 0], [0, shards.padded_size - size]])
    assert shards.padded_size == workers * shards.length

    def work(group: Any) -> list[Any]:
        local = shards.local_slice(tf.constant(wholes), group.rank)
        slices = [
            shards.local_slice(tf.constant(x), group.rank) for x in longer
        ]
        return [
            local,
            shards.gather(local[0], group),
            shards.gather_all(slices, group),
            shards.reduce(tf.constant(wholes[group.rank]), group),
        ]

    results = run_together(workers, work)
    for rank, ((local, first, rows, total), received) in enumerate(results):
        place = rank * shards.length
        want = longer[:, place : place + shards.length]
        np.testing.assert_array_equal(local, want)
        np.testing.assert_array_equal(first, wholes[0])
        np.testing.assert_array_equal(rows, longer)
        np.testing.assert_allclose(total, want.sum(0), atol=1e-14)
        assert received == (2 + workers) * shards.length * (workers - 1)
