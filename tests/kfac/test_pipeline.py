"""Communication overlaps with computation.

Tests inspect dependencies in the graph and measure no times.
"""

import collections
from typing import Any
from unittest import mock

import pytest

from tests.support.collectives import (
    ancestors,
    audit,
    bodies_of,
    contains,
    graph_over_nccl,
    is_collective,
    parents_of,
)
from tfkfac.distributed import collectives

HIDDEN = [5, 6, 7, 8, 9]
LAYERS = len(HIDDEN) + 1
OWNED = LAYERS // 2  # by each of two replicas, in turn

pytestmark = pytest.mark.slow


def stages(
    optimizer: str, kernel: str, messages: int
) -> list[tuple[int, list[int]]]:
    """Trace a step over NCCL with a message for each tensor.

    Args:
        optimizer: Key of `OPTIMIZERS`.
        kernel: Operation by which work is recognized.
        messages: Number of messages of a replica in the branch of the graph.

    Returns:
        For each replica the number of nodes with work, and of these the number
        that each message waits for, in ascending order.
    """
    with mock.patch.object(collectives, "BUCKET_BYTES", 1):
        graph, _ = graph_over_nccl(optimizer, HIDDEN)
    assert not audit(graph)["unordered"]
    (_, *bodies), functions = bodies_of(graph)
    result = []
    for nodes in bodies:
        sent, work = collections.defaultdict(list), collections.defaultdict(set)
        for node in nodes:
            if is_collective(node):
                sent[node.device].append(node.name)
            elif not contains(node, functions, is_collective) and contains(
                node, functions, lambda inner: inner.op == kernel
            ):
                work[node.device].add(node.name)
        parents = parents_of(nodes)
        for device, names in sent.items():
            if device in work and len(names) == messages:
                before = [ancestors(x, parents) & work[device] for x in names]
                result.append((len(work[device]), sorted(map(len, before))))
    assert len(result) == 2
    return result


@pytest.mark.parametrize("where", ["mirrored"])
def test_statistics_overlap_with_computation(
    on_workers: Any, where: str
) -> None:
    """The last layer's statistics are sent first, without waiting."""
    (result,) = on_workers(where, stages, "comm_opt", "MatMul", 2 * LAYERS)
    for work, counts in result:
        a_layer = work / LAYERS
        assert 0 < counts[0] <= a_layer
        # In NCCL's order, a message waits for the messages before it only.
        for place, count in enumerate(counts):
            assert count <= a_layer * (place // 2 + 1)
        assert counts[-1] == work


@pytest.mark.parametrize("where", ["mirrored"])
def test_gradients_overlap_with_decompositions(
    on_workers: Any, where: str
) -> None:
    """A stage's gradients are sent while the next stage is decomposed."""
    (result,) = on_workers(where, stages, "dp_kfac", "Cholesky", LAYERS)
    for work, counts in result:
        assert work == OWNED - 1
        # Each round has a message of each replica.
        assert counts[:2] == [0, 0]
        for place, count in enumerate(counts):
            assert count <= place // 2
