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


def test_a_half_is_rounded_up() -> None:
    assert assign_roles(3, 0.5).accelerators == (1, 2)


@pytest.mark.parametrize(
    ("fraction", "missing"), [(0.12, "accelerator"), (0.9, "worker")]
)
def test_error_for_an_empty_role(fraction: float, missing: str) -> None:
    with pytest.raises(ValueError) as error:
        assign_roles(4, fraction)
    message = str(error.value)
    assert "Argument `accelerator_fraction` must" in message
    assert f"no {missing}" in message
    assert "of 4 replicas" in message
    assert f"Received: accelerator_fraction={fraction}" in message


def test_peers_have_the_same_role() -> None:
    assert Roles((0, 1, 2)).peers(1) == (0, 1, 2)
    roles = Roles((0, 1), (2, 3, 4))
    for rank, peers in [(0, (0, 1)), (1, (0, 1)), (2, (2, 3, 4))]:
        assert roles.peers(rank) == peers


def test_ranks_within_a_group() -> None:
    """Sub-groups keep the token, which orders all collectives."""
    token = tf.Variable(0.0)
    for rank, place in [(2, 0), (4, 2)]:
        part = Communicator(rank, 5, "scope", token=token).among((2, 3, 4))
        assert (part.rank, part.size) == (place, 3)
        assert part._token is token
