"""Collectives are neither pruned nor reordered.

A pruned collective hangs the other replicas. This can happen if a replica does
not need the result, as in a model with one layer, owned by one replica. NCCL
matches calls by order; the tests check the order in the graph, without GPUs.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tests.support import workers_collectives
from tests.support.cluster import Pool
from tests.support.gpu_kernels import REPORTS
from tests.support.jobs import Jobs
from tests.support.workers_collectives import HALF, OPTIMIZERS
from tfkfac.distributed.collectives import Communicator

JOBS = Jobs(workers_collectives)
NCCL = {f"mirrored: {name} over NCCL": name for name in OPTIMIZERS | HALF}
SINGLE = {f"two: one layer, {name}": name for name in OPTIMIZERS}
JOBS.add("two: meetings", "meetings")
for job, name in NCCL.items():
    JOBS.add(job, "step_over_nccl", name)
for job, name in SINGLE.items():
    JOBS.add(job, "one_layer", name)


@pytest.mark.parametrize("job", NCCL)
def test_all_are_in_one_order(pool: Pool, job: str) -> None:
    """In TensorFlow, NCCL sums neither integers nor bfloat16."""
    (result,) = JOBS.results(pool, job)
    assert result["pairs"] >= 3, result
    assert not result["unordered"], result
    # Clocks of waiting times and event reports run on the host; the report
    # of empty batches has a number.
    assert result["not on a GPU"] <= REPORTS | {"Timestamp", "StringFormat"}
    assert result["added up"] <= {"float32", "float64"}


@pytest.mark.slow
def test_bytes_of_bfloat16_factors(pool: Pool) -> None:
    """A model with 4 inputs, two layers of 5 units, 3 outputs, and biases."""
    (result,) = JOBS.results(pool, "mirrored: half over NCCL")
    inputs, outputs = (5, 6, 6), (5, 5, 3)
    elements = sum(n * n for n in inputs + outputs)
    # A factor is sent with its number of rows and its unit.
    scalars = 2 * len(inputs + outputs)
    # In a ring of two replicas, each receives half of the sum twice.
    assert result["bytes"]["factor"]["factors"] == 4 * (elements + scalars)


@pytest.mark.slow
@pytest.mark.parametrize("job", SINGLE)
def test_a_model_of_one_layer_trains(pool: Pool, job: str) -> None:
    first, second = JOBS.results(pool, job)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


@contract(
    "compat.strategies.store_text",
    "All processes of a job read the first text that is stored for a key.",
)
def test_rendezvous(pool: Pool) -> None:
    """No member waits forever, and all members get the same result."""
    for result in JOBS.results(pool, "two: meetings"):
        assert result == {"both": True, "moments": False, "alone": False}


def test_no_two_reductions_share_a_scope() -> None:
    """TensorFlow would fuse them, even if they depend on each other."""
    token = tf.Variable(0.0)

    def twice() -> tf.Tensor:
        group = Communicator(0, 2, "two of a scope", token=token)
        (first,) = group.all_reduce([tf.ones([3])])
        (second,) = group.all_reduce([first + 1.0])
        return second

    graph = tf.function(twice).get_concrete_function().graph
    names = [
        op.name
        for op in graph.get_operations()
        if op.type == "CollectiveReduce"
    ]
    assert len(names) == 2
    assert len({name.rpartition("/")[0] for name in names}) == 2
