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
few = settings(max_examples=30, deadline=None)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(0).normal(size=shape)


@given(SIZES, WORKERS)
def test_every_element_has_one_owner(size: int, workers: int) -> None:
    shards = Shards(size, workers)
    owned = [i for w in range(workers) for i in range(size)[shards.range(w)]]
    assert owned == list(range(size))


@given(SIZES, WORKERS)
def test_lengths(size: int, workers: int) -> None:
    """As short as equal slices can be; none is longer."""
    shards = Shards(size, workers)
    assert shards.length * workers >= size > (shards.length - 1) * workers
    for worker in range(workers):
        part = shards.range(worker)
        assert 0 <= part.stop - part.start <= shards.length
        assert 0 <= part.start <= part.stop <= size


@pytest.mark.parametrize(
    "size,workers,ends",
    [
        (8, 4, [2, 4, 6, 8]),
        (9, 4, [3, 6, 9, 9]),  # the last has none
        (5, 4, [2, 4, 5, 5]),
        (3, 4, [1, 2, 3, 3]),
        (1, 4, [1, 1, 1, 1]),
        (7, 1, [7]),
    ],
)
def test_ranges(size: int, workers: int, ends: list[int]) -> None:
    shards = Shards(size, workers)
    assert [shards.range(w).stop for w in range(workers)] == ends


@few
@given(SIZES, WORKERS)
def test_own_ends_in_zeros(size: int, workers: int) -> None:
    shards = Shards(size, workers)
    for shape in ([size], [2, size]):
        whole = numbers(*shape)
        for worker in range(workers):
            own = shards.own(tf.constant(whole), worker).numpy()
            assert own.shape == (*shape[:-1], shards.length)
            part = whole[..., shards.range(worker)]
            np.testing.assert_array_equal(own[..., : part.shape[-1]], part)
            assert not own[..., part.shape[-1] :].any()


@few
@given(SIZES, WORKERS)
def test_gather(size: int, workers: int) -> None:
    """Each worker gets the whole vector, and as many elements as it lacks."""
    shards, whole = Shards(size, workers), numbers(size)

    def work(group: Any) -> Array:
        own = shards.own(tf.constant(whole), group.rank)
        return shards.gather(own, group).numpy()

    for got, received in run_together(workers, work):
        np.testing.assert_array_equal(got, whole)
        assert received == shards.length * (workers - 1)


@few
@given(SIZES, WORKERS)
def test_whole_vectors(size: int, workers: int) -> None:
    """Several at once, with the zeros at the end."""
    shards, wholes = Shards(size, workers), numbers(2, size)
    longer = np.pad(wholes, [[0, 0], [0, shards.whole - size]])

    def work(group: Any) -> list[Array]:
        own = [shards.own(tf.constant(x), group.rank) for x in longer]
        return [x.numpy() for x in shards.gather_all(own, group)]

    assert shards.whole == workers * shards.length
    for got, received in run_together(workers, work):
        np.testing.assert_array_equal(got, longer)
        assert received == 2 * shards.length * (workers - 1)


@few
@given(SIZES, WORKERS)
def test_reduce(size: int, workers: int) -> None:
    """Each worker gets its slice of the sum of all vectors."""
    shards, wholes = Shards(size, workers), numbers(workers, size)

    def work(group: Any) -> Array:
        return shards.reduce(tf.constant(wholes[group.rank]), group).numpy()

    total = tf.constant(wholes.sum(0))
    for rank, (got, received) in enumerate(run_together(workers, work)):
        want = shards.own(total, rank).numpy()
        np.testing.assert_allclose(got, want, atol=1e-14)
        assert received == shards.length * (workers - 1)
