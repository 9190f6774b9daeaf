"""Communication overlaps with computation.

Tests inspect dependencies in the graph and measure no times.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple
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


class Branch(NamedTuple):
    """A branch of a step with messages, on one replica.

    Attributes:
        work: Nodes with work.
        before: For each message, the nodes of `work` that it waits for.
    """

    work: set[str]
    before: list[set[str]]


def branches(optimizer: str, kernel: str) -> list[Branch]:
    """Trace a step over NCCL with a message for each tensor.

    Args:
        optimizer: Key of `OPTIMIZERS`.
        kernel: Operation by which work is recognized.
    """
    with mock.patch.object(collectives, "BUCKET_BYTES", 1):
        graph, _ = graph_over_nccl(optimizer, HIDDEN)
    assert not audit(graph)["unordered"]
    (_, *bodies), functions = bodies_of(graph)
    return [
        branch
        for nodes in bodies
        for branch in branches_of(nodes, functions, kernel)
    ]


def branches_of(
    nodes: Any, functions: Mapping[str, Any], kernel: str
) -> list[Branch]:
    """Return a branch for each replica with messages and work."""
    messages, work = collections.defaultdict(list), collections.defaultdict(set)
    for node in nodes:
        if is_collective(node):
            messages[node.device].append(node.name)
        elif not contains(node, functions, is_collective) and contains(
            node, functions, lambda inner: inner.op == kernel
        ):
            work[node.device].add(node.name)
    parents = parents_of(nodes)
    return [
        Branch(
            work[device],
            [ancestors(name, parents) & work[device] for name in sent],
        )
        for device, sent in messages.items()
        if device in work
    ]


@pytest.mark.parametrize("where", ["mirrored"])
def test_statistics_overlap_with_computation(
    on_workers: Any, where: str
) -> None:
    """The last layer's statistics are sent first, without waiting."""
    (result,) = on_workers(where, branches, "comm_opt", "MatMul")
    replicas = [b for b in result if len(b.before) == 2 * LAYERS]
    assert len(replicas) == 2
    for work, before in replicas:
        a_layer = len(work) / LAYERS
        counts = sorted(len(nodes) for nodes in before)
        assert 0 < counts[0] <= a_layer
        # In NCCL's order, a message waits for the messages before it only.
        for place, count in enumerate(counts):
            assert count <= a_layer * (place // 2 + 1)
        assert set.union(*before) == work


@pytest.mark.parametrize("where", ["mirrored"])
def test_gradients_overlap_with_decompositions(
    on_workers: Any, where: str
) -> None:
    """A stage's gradients are sent while the next stage is decomposed."""
    (result,) = on_workers(where, branches, "dp_kfac", "Cholesky")
    replicas = [b for b in result if len(b.before) == LAYERS]
    assert len(replicas) == 2
    for work, before in replicas:
        assert len(work) == OWNED - 1
        # Each round has a message of each replica.
        counts = sorted(len(nodes) for nodes in before)
        assert counts[:2] == [0, 0]
        for place, count in enumerate(counts):
            assert count <= place // 2
