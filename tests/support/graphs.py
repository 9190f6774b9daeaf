"""What TensorFlow makes of a graph before it runs it."""

from collections.abc import Callable
from typing import Any

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
