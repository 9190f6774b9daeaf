"""What TensorFlow makes of a graph before it runs it."""

from collections.abc import Callable
from typing import Any

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


def operations(function: Callable[[Any], Any]) -> set[str]:
    """Types of the operations that are run, once TensorFlow has optimised."""
    logs = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        # What is fetched itself is not touched.
        result = tf.identity(function(tf.random.uniform([2])))
        session.run(result, options=options, run_metadata=logs)
    return {node.op for graph in logs.partition_graphs for node in graph.node}


def called(node: Any) -> str | None:
    """The function that a node of a `GraphDef` calls, if it is a call."""
    if node.op.endswith("PartitionedCall"):
        return str(node.attr["f"].func.name)
    return str(node.op) if node.op.startswith("__inference_") else None
