"""Collectives are neither pruned nor do they change places.

A pruned one hangs the other replicas, and only where a replica does not need
its result: in a model of one layer, of which one replica owns everything.
NCCL pairs the calls of devices by their order, which nothing here can run:
that they have one is read off the graphs.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import workers_collectives
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tests.support.workers_collectives import OPTIMIZERS
from tfkfac.distributed.collectives import Communicator

JOBS = Jobs(workers_collectives)
ORDERS = {f"mirrored: order of {name}": name for name in OPTIMIZERS}
SINGLE = {f"two: one layer, {name}": name for name in OPTIMIZERS}
for job, name in ORDERS.items():
    JOBS.add(job, "unordered", name)
for job, name in SINGLE.items():
    JOBS.add(job, "one_layer", name)


@pytest.mark.parametrize("job", ORDERS)
def test_all_are_in_one_order(pool: Pool, job: str) -> None:
    (found,) = JOBS.results(pool, job)
    assert found["pairs"] >= 3, found
    assert not found["unordered"], found


@pytest.mark.parametrize("job", SINGLE)
def test_a_model_of_one_layer_trains(pool: Pool, job: str) -> None:
    first, second = JOBS.results(pool, job)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


def test_a_part_of_a_group_has_its_token() -> None:
    """Or the collectives of both would not be ordered among each other."""
    token = tf.Variable(0.0)
    part = Communicator(2, 4, "scope", token=token).among((0, 2))
    assert (part.rank, part.size) == (1, 2)
    assert part._token is token
