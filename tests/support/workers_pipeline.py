"""What the tests of pipelining run: what each message of a step waits for."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from tests.support.graphs import functions_of
from tests.support.workers_collectives import (
    ancestors,
    audit,
    graph_over_nccl,
    holds_collective,
    is_collective,
    parents_of,
)
from tfkfac.distributed import collectives


class Branch(NamedTuple):
    """A branch of a step with messages, on one replica.

    Attributes:
        work: The pieces of work in it.
        before: For each message, those that it waits for.
    """

    work: set[str]
    before: list[set[str]]


def waits(
    kind: str, optimizer: str, hidden: Sequence[int], kernel: str
) -> dict[str, Any]:
    """Traces a step in which each tensor has a message of its own.

    The order that NCCL needs is in it: all that may have to wait does.

    Args:
        kind: Of the strategy.
        optimizer: Name of the optimizer.
        hidden: Units of the hidden layers.
        kernel: The operation that a piece of work is known by.

    Returns:
        The branches with both; and collectives that no path orders.
    """
    with mock.patch.object(collectives, "BUCKET_BYTES", 1):
        graph = graph_over_nccl(kind, optimizer, hidden)[0].as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    order: dict[str, Any] = {"collectives": 0, "pairs": 0, "unordered": []}
    branches = []
    audit(graph.node, functions, order)
    for function in functions.values():
        audit(function.node_def, functions, order)
        branches += branches_of(function.node_def, functions, kernel)
    return {"branches": branches, "unordered": order["unordered"]}


def branches_of(
    nodes: Any, functions: Mapping[str, Any], kernel: str
) -> list[Branch]:
    """A function, once for each replica that has messages and work in it."""
    messages, work = collections.defaultdict(list), collections.defaultdict(set)
    for node in nodes:
        if is_collective(node):
            messages[node.device].append(node.name)
        elif holds(node, functions, kernel):
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


def holds(node: Any, functions: Mapping[str, Any], kernel: str) -> bool:
    """Whether a node is of a kind, or calls a function with it alone."""
    if holds_collective(node, functions):
        return False
    return node.op == kernel or any(
        holds(inner, functions, kernel)
        for name in functions.keys() & functions_of(node)
        for inner in functions[name].node_def
    )
