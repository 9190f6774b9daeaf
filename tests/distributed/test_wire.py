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
def random_items(draw: st.DrawFn) -> list[Item]:
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
@given(random_items())
def test_members_get_what_the_root_has(sent: list[Item]) -> None:
    def work(group: Any) -> Any:
        computed = []

        def value(item: Item) -> tf.Tensor:
            computed.append(item.layer)
            return value_of(item)

        values = broadcast_items(group, sent, value)
        return values, computed, group.received_bytes

    results = run_together(WORKERS, work)
    for rank, ((values, computed, received), _) in enumerate(results):
        items = [item for item in sent if rank in item.members]
        assert set(values) == {(item.layer, "x") for item in items}
        for item in items:
            value = values[item.layer, "x"]
            np.testing.assert_array_equal(value, value_of(item))
        assert computed == [i.layer for i in sent if i.root == rank]
        others = [item for item in items if item.root != rank]
        assert received == sum(
            math.prod(item.spec.shape) * item.spec.dtype.size for item in others
        )


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of two scalars: the first of each sender, then the second."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 8)
    spec = tf.TensorSpec([1])
    sent = [Item(i, "x", spec, i % 2, (0, 1)) for i in range(7)]
    result = [[item.layer for item in group] for group in rounds(sent)]
    assert result == [[0, 2, 1, 3], [4, 6, 5]]


def test_ring_all_reduce() -> None:
    """Each worker receives 2 (P - 1) / P of the data."""
    sizes = (100, 1), (100, 2), (100, 4), (10, 3), (0, 4)
    assert [all_reduce_bytes(*x) for x in sizes] == [0, 100, 150, 13, 0]
