"""Broadcasts from owners to the workers that need them; roles of replicas."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lockstep import run_together
from tfkfac.distributed.collectives import (
    Communicator,
    Item,
    all_reduce_bytes,
    broadcast_items,
)
from tfkfac.distributed.topology import assign_roles

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


def test_ring_all_reduce() -> None:
    """Each worker receives 2 (P - 1) / P of the data."""
    sizes = (100, 1), (100, 2), (100, 4), (10, 3), (0, 4)
    assert [all_reduce_bytes(*x) for x in sizes] == [0, 100, 150, 13, 0]


# ------------------------------------------------------------------------ roles
REPLICAS = st.integers(1, 64)
FRACTIONS = st.floats(0, 1, exclude_max=True)


@given(REPLICAS, FRACTIONS)
def test_every_replica_has_one_role(replicas: int, fraction: float) -> None:
    """The last replicas are accelerators, a given fraction."""
    try:
        roles = assign_roles(replicas, fraction)
    except ValueError:
        rounded = int(fraction * replicas + 0.5)
        assert rounded in (0, replicas)
        assert fraction > 0
        return
    assert roles.workers + roles.accelerators == tuple(range(replicas))
    assert roles.workers
    assert bool(roles.accelerators) == (fraction > 0)
    assert abs(len(roles.accelerators) - fraction * replicas) <= 0.5
    for rank in range(replicas):
        assert roles.trains(rank) == (rank in roles.workers)


def test_roles_of_few_replicas() -> None:
    """A half is rounded up, and no role may be empty."""
    assert assign_roles(3, 0.5).accelerators == (1, 2)
    for fraction, missing in ((0.12, "accelerator"), (0.9, "worker")):
        words = f"Argument `accelerator_fraction` .*no {missing}.*={fraction}"
        with pytest.raises(ValueError, match=words):
            assign_roles(4, fraction)


def test_ranks_within_a_group() -> None:
    """Sub-groups keep the token, which orders all collectives."""
    token = tf.Variable(0.0)
    for rank, place in [(2, 0), (4, 2)]:
        part = Communicator(rank, 5, "scope", token=token).among((2, 3, 4))
        assert (part.rank, part.size) == (place, 3)
        assert part.token is token
