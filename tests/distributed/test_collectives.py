"""Collectives are neither pruned nor reordered.

A pruned collective hangs the other replicas. This can happen if a replica does
not need the result, as in a model with one layer, owned by one replica. NCCL
matches calls by order; the tests check the order in the graph, without GPUs.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfkfac
from tests.compat.contracts import contract
from tests.support.cluster import run
from tests.support.collectives import (
    OPTIMIZERS,
    audit,
    batches,
    build,
    graph_over_nccl,
)
from tests.support.gpu_kernels import REPORTS, nodes_of, without_gpu_kernel
from tests.support.marks import with_slow
from tests.support.strategies import strategy
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import find_topology


def step_over_nccl(optimizer: str) -> dict[str, Any]:
    graph, model = graph_over_nccl(optimizer, [5])
    return audit(graph) | {
        "not on a GPU": without_gpu_kernel(graph),
        "summed": {
            tf.as_dtype(node.attr["T"].type).name
            for node in nodes_of(graph)
            if node.op == "CollectiveReduce"
        },
        "bytes": model.optimizer.communication_bytes(),
    }


QUICK = "dp_kfac", "columns", "half"
# With two replicas, HYBRID-OPT is MEM-OPT.
OTHERS = [n for n in OPTIMIZERS if n not in (*QUICK, "hybrid_opt")]


@pytest.mark.parametrize(
    "optimizer",
    with_slow([*QUICK, *OTHERS], *OTHERS),
    ids="mirrored: {}".format,
)
def test_all_are_in_one_order(on_workers: Any, optimizer: str) -> None:
    """In TensorFlow, NCCL sums neither integers nor bfloat16."""
    (result,) = on_workers("mirrored", step_over_nccl, optimizer)
    assert result["pairs"] >= 3, result
    assert not result["unordered"], result
    # Clocks of waiting times and event reports run on the host; the report
    # of empty batches has a number.
    assert result["not on a GPU"] <= REPORTS | {"Timestamp", "StringFormat"}
    assert result["summed"] <= {"float32", "float64"}
    if optimizer == "half":
        # 4 inputs, a layer of 5 units, 3 outputs, and biases.
        inputs, outputs = (5, 6), (5, 3)
        elements = sum(n * n for n in inputs + outputs)
        # A factor is sent with its number of rows and its unit.
        scalars = 2 * len(inputs + outputs)
        # In a ring of two replicas, each receives half of the sum twice.
        received = result["bytes"]["factor"]["factors"]
        assert received == 4 * (elements + scalars)


def train_one_layer() -> dict[str, Any]:
    """Train models of which one replica owns all, with several optimizers."""
    weights = {}
    for optimizer in ("mem_opt", "dp_kfac", "columns", "accelerator"):
        model = build(strategy(), optimizer, [])
        model.fit(batches(6), verbose=0)
        weights[optimizer] = [np.asarray(w) for w in model.get_weights()]
    return weights


@pytest.mark.slow
def test_a_model_of_one_layer_trains(on_workers: Any) -> None:
    first, second = on_workers("two", train_one_layer)
    for optimizer, values in first.items():
        np.testing.assert_equal(values, second[optimizer])
        assert all(np.isfinite(value).all() for value in values)


def gather_texts() -> dict[str, bool]:
    """Call `all_come` with equal and different texts, and without a member."""
    rank = find_topology(strategy()).process
    group = Communicator(rank, 2, "meetings")
    results = {
        "equal": group.all_come("equal", "7", 60),
        "different": group.all_come("different", str(rank), 60),
    }
    if rank == 0:
        results["alone"] = group.all_come("alone", "7", 0.1)
    group.all_come("after it", "7", 60)
    if rank == 1:
        results["alone"] = group.all_come("alone", "7", 60)
    return results


@contract(
    "compat.coordination.set_text",
    "All processes of a job read the first text that is stored for a key.",
)
def test_rendezvous(on_workers: Any) -> None:
    """No member waits forever, and all members get the same result."""
    want = {"equal": True, "different": False, "alone": False}
    assert on_workers("two", gather_texts) == [want, want]


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


# --------------------------------------- several processes with several devices
EXTENDED = collective_all_reduce_strategy.CollectiveAllReduceExtended
OF_FOUR = ("hybrid_opt", "dp_kfac", "rows", "accelerator")


def two_devices(_: Any, resolver: Any, worker: str) -> Any:
    return tuple(f"{worker}/device:CPU:{i}" for i in range(2)), "CPU"


def train() -> dict[str, Any]:
    """Train a model with each optimizer on two devices of each process.

    TensorFlow's strategy uses one CPU of each process. With the patch it uses
    two, as on hosts with several GPUs.
    """
    with mock.patch.object(EXTENDED, "_initialize_local_devices", two_devices):
        grid = tfkfac.MultiWorkerMirroredStrategy()
    assert grid.num_replicas_in_sync == 4
    results = {}
    for name in OF_FOUR:
        model = build(grid, name, [5])
        model.fit(batches(6), verbose=0)
        results[name] = [
            [np.asarray(v) for v in grid.experimental_local_results(w.value)]
            for w in model.trainable_variables
        ]
    return results


@pytest.mark.slow
def test_two_processes_of_two_devices() -> None:
    """All four replicas have equal bits, and nearly those of one process."""
    first, second = run(train, workers=2, devices=2)
    for name in OF_FOUR:
        for ours, theirs in zip(first[name], second[name], strict=True):
            for copy in (*ours, *theirs):
                np.testing.assert_array_equal(copy, ours[0])
    # DP-KFAC and accelerators are other algorithms with several replicas.
    for name in ("hybrid_opt", "rows"):
        alone = build(tf.distribute.get_strategy(), name, [5])
        alone.fit(batches(6), verbose=0)
        for ours, want in zip(first[name], alone.get_weights(), strict=True):
            np.testing.assert_allclose(ours[0], want, atol=1e-5)
