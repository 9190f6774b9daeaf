"""Roles of replicas (worker, accelerator) and groups of replicas."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import Roles, assign_roles

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


def test_peers_have_the_same_role() -> None:
    roles = Roles((0, 1), (2, 3, 4))
    assert [roles.peers(rank) for rank in (1, 2)] == [(0, 1), (2, 3, 4)]


def test_ranks_within_a_group() -> None:
    """Sub-groups keep the token, which orders all collectives."""
    token = tf.Variable(0.0)
    for rank, place in [(2, 0), (4, 2)]:
        part = Communicator(rank, 5, "scope", token=token).among((2, 3, 4))
        assert (part.rank, part.size) == (place, 3)
        assert part.token is token
