"""What is in a graph, and what TensorFlow makes of it before it runs it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context


def optimized_nodes(run: Callable[[], Any]) -> list[Any]:
    """The nodes of the functions that are run, after all optimisation."""
    active = context.context()
    active.enable_run_metadata()
    try:
        run()
        metadata = active.export_run_metadata()
    finally:
        active.disable_run_metadata()
    return [
        node
        for functions in metadata.function_graphs
        for graph in functions.partition_graphs
        for node in [
            *graph.node,
            *(n for f in graph.library.function for n in f.node_def),
        ]
    ]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective in a graph, and the branches of it that it is in."""

    kind: str
    branches: tuple[str, ...]
    elements: int
    dtype: str
    group: int

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return self.elements * tf.as_dtype(self.dtype).size


def collectives(graph: Any) -> list[Collective]:
    found = []
    for branches, node in walk(graph):
        if not node.op.startswith("Collective"):
            continue
        shapes = [node.attr["shape"].shape]
        if node.attr["_output_shapes"].list.shape:
            shapes += node.attr["_output_shapes"].list.shape
        sizes = [int(np.prod([d.size for d in s.dim])) for s in shapes if s.dim]
        dtype = tf.as_dtype(node.attr["T"].type).name
        kind = node.op.removeprefix("Collective")
        group = node.attr["group_size"].i
        found.append(Collective(kind, branches, max(sizes), dtype, group))
    return found


def count_ops(graph: Any, names: Sequence[str]) -> int:
    return sum(node.op in names for _, node in walk(graph))


def bodies_of(graph: tf.Graph) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the nodes of a graph and of its functions; functions by name."""
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    nodes = [f.node_def for f in functions.values()]
    return [definition.node, *nodes], functions


def walk(graph: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Nodes that a graph can reach, and the branches that they are in."""
    library = {f.signature.name: f for f in graph.library.function}

    def visit(
        nodes: Any, around: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        for node in nodes:
            yield around, node
            for name in sorted(library.keys() & functions_of(node)):
                branch = (name,) if node.op.endswith("If") else ()
                inside = (*around, *branch)
                yield from visit(library[name].node_def, inside)

    return visit(graph.node, ())


def functions_of(node: Any) -> set[str]:
    """What a node calls if it is a function: by its attributes or its kind."""
    values = node.attr.values()
    lists = [f.name for value in values for f in value.list.func]
    return {node.op, *(value.func.name for value in values), *lists}
