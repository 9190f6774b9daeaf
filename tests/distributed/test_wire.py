"""Broadcasts of items from the owners to the workers that need them."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lockstep import run_together
from tfkfac.distributed import collectives
from tfkfac.distributed.collectives import (
    Item,
    all_reduce_bytes,
    broadcast_items,
    rounds,
)

WORKERS = 3


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    """Random items with random sizes, senders and receivers."""
    result = []
    for number in range(draw(st.integers(1, 6))):
        members = draw(
            st.sets(st.integers(0, WORKERS - 1), min_size=1).map(sorted)
        )
        root = draw(st.sampled_from(members))
        size = draw(st.integers(0, 5))
        dtype = draw(st.sampled_from([tf.float32, tf.float64]))
        spec = tf.TensorSpec([size], dtype)
        result.append(Item(number, "x", spec, root, tuple(members)))
    return result


def value_of(item: Item) -> tf.Tensor:
    return tf.fill(item.spec.shape, tf.cast(item.layer + 1, item.spec.dtype))


@settings(max_examples=30, deadline=None)
@given(items())
def test_members_get_what_the_root_has(sent: list[Item]) -> None:
    def work(group: Any) -> Any:
        asked = []

        def value(item: Item) -> tf.Tensor:
            asked.append(item.layer)
            assert item.root == group.rank
            return value_of(item)

        got = broadcast_items(group, sent, value)
        return got, asked, group.received_bytes

    results = run_together(WORKERS, work)
    for rank, ((got, asked, received), _) in enumerate(results):
        mine = [item for item in sent if rank in item.members]
        assert set(got) == {(item.layer, "x") for item in mine}
        for item in mine:
            np.testing.assert_array_equal(got[item.layer, "x"], value_of(item))
        assert asked == [i.layer for i in sent if i.root == rank]
        others = [item for item in mine if item.root != rank]
        assert received == sum(
            math.prod(item.spec.shape) * item.spec.dtype.size for item in others
        )


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of two scalars: the first of each sender, then the second."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 8)
    spec = tf.TensorSpec([1])
    sent = [Item(i, "x", spec, i % 2, (0, 1)) for i in range(7)]
    result = [[item.layer for item in one] for one in rounds(sent)]
    assert result == [[0, 2, 1, 3], [4, 6, 5]]


@pytest.mark.parametrize(
    ("size", "workers", "want"),
    [(100, 1, 0), (100, 2, 100), (100, 4, 150), (10, 3, 13), (0, 4, 0)],
)
def test_ring_all_reduce(size: int, workers: int, want: int) -> None:
    """Each worker receives 2 (P - 1) / P of the data."""
    assert all_reduce_bytes(size, workers) == want
