"""Which nodes of a graph could not run on a GPU.

TensorFlow's wheel for CPUs knows the kernels of GPUs by name, so that a graph
can be asked without one.
"""

import collections
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

from tests.support.graphs import bodies_of

# The event reports, which are left out of what XLA compiles: strings live on
# the host, and a step that is not compiled runs them there.
REPORTS = {
    "PrintV2",
    "StringJoin",
    "ReduceJoin",
    "GatherV2 of string",
    "Const of string",
    "Reshape of string",
}


def without_gpu_kernel(graph: tf.Graph) -> set[str]:
    """Operations of a graph and its functions that only a CPU has."""
    return {
        described(node)
        for node in nodes_of(graph)
        if not any(runs_on(node, device) for device in ("GPU", "DEFAULT"))
    }


def nodes_of(graph: tf.Graph) -> Iterator[Any]:
    """Yield all operations, but no calls of functions."""
    bodies, functions = bodies_of(graph)
    for node in itertools.chain(*bodies):
        if node.op not in functions:
            yield node


def described(node: Any) -> str:
    """Its name, with the dtype if that is what has no kernel."""
    kinds = [node.attr[name].type for name in ("dtype", "T", "Tparams")]
    of_strings = tf.string.as_datatype_enum in kinds
    return f"{node.op} of string" if of_strings else str(node.op)


@functools.cache
def registered() -> dict[tuple[str, str], list[Any]]:
    found = collections.defaultdict(list)
    for kernel in kernels.get_all_registered_kernels().kernel:
        found[kernel.op, kernel.device_type].append(kernel)
    return found


def runs_on(node: Any, device: str) -> bool:
    return any(
        all(
            set(types_of(node, rule.name)) <= set(rule.allowed_values.list.type)
            for rule in kernel.constraint
        )
        for kernel in registered().get((node.op, device), ())
    )


def types_of(node: Any, name: str) -> list[int]:
    """The types of an attribute; what a node does not say is the default."""
    attribute = node.attr.get(name)
    if attribute is None:
        operation = op_def_registry.get(node.op)
        (attribute,) = (
            a.default_value for a in operation.attr if a.name == name
        )
    return list(attribute.list.type) or [attribute.type]
