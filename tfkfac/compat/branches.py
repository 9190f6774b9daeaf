"""Branches of a graph that are there for their effects alone."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.atomic_function import (
    AtomicFunction,
)

from tfkfac.compat.calls import as_written, say_what_is_read
from tfkfac.compat.graphs import on_one_device

_FUNCTIONS = "_tfkfac_branches"


def when(predicate: tf.Tensor, do: Callable[[], object]) -> list[tf.Operation]:
    """Does something if a predicate says so, else nothing.

    In a `tf.cond` each tensor that a branch uses is a placeholder of both
    branches, and three operations more once TensorFlow has put its own control
    flow in place of the condition: half of the nodes of a K-FAC step. Here the
    branch is a function that stays one, and nothing is traced for the other.

    This relies on the operation `If` taking functions that are made of their
    definition, and on `captured_inputs` of a function that is traced.
    Where there are several devices the branch calls the function, which is
    then placed on them as elsewhere, and the condition itself is replaced, as
    in `tf.cond`: all that is passed to the kernel of `If` has to be on one.
    Branches of two replicas that only read a variable must not wait for each
    other, so the condition says which ones it only reads.

    Args:
        predicate: Scalar bool.
        do: What is done. Collectives are legal in it; what it returns is lost.

    Returns:
        What to wait for until it is done, if anything.
    """
    if tf.executing_eagerly():
        if predicate:
            do()
        return []

    def body() -> None:
        do()

    # Profiles of a step and its graph show it.
    body.__name__ = getattr(do, "__name__", "branch").strip("<>")
    function = tf.function(
        body, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function()
    given, name = function.captured_inputs, function.name.decode()
    graph = tf.compat.v1.get_default_graph()
    graph._add_function_recursive(function.inference_fn)
    # Who looks for the graph of a branch, to export it, is given the body's.
    _kept(graph).append(function)
    alone = on_one_device()
    otherwise, calling = f"{name}_otherwise", f"{name}_called"
    _add(graph, _definition(otherwise, given), function)
    if not alone:
        _add(graph, _calling(name, _definition(calling, given)), function)
    condition = tf.raw_ops.If(
        cond=predicate,
        input=given,
        Tout=[],
        then_branch=name if alone else calling,
        else_branch=otherwise,
    )
    say_what_is_read(condition, function.graph, before=1)
    condition._set_attr(
        "_lower_using_switch_merge", tf.compat.v1.AttrValue(b=not alone)
    )
    return [condition]


def _add(graph: tf.Graph, definition: Any, function: Any) -> None:
    """Makes a function known that takes what another one takes."""
    context.context().add_function_def(definition)
    graph._add_function_recursive(
        AtomicFunction(
            definition.signature.name,
            context.context(),
            function.function_type,
            [function.inference_fn],
            cached_graph=function.graph,
        )
    )


def _kept(graph: tf.Graph) -> list[Any]:
    """The functions that live as long as a graph does."""
    if not hasattr(graph, _FUNCTIONS):
        setattr(graph, _FUNCTIONS, [])
    return getattr(graph, _FUNCTIONS)


def _definition(name: str, given: Sequence[tf.Tensor]) -> Any:
    """A function that does nothing with what it is given."""
    definition = FunctionDef()
    definition.signature.name = name
    for i, tensor in enumerate(given):
        definition.signature.input_arg.add(
            name=f"x{i}", type=tensor.dtype.as_datatype_enum
        )
    return definition


def _calling(name: str, definition: Any) -> Any:
    """The same, but it calls another function with what it is given."""
    signature = definition.signature
    call = definition.node_def.add(name="call", op="StatefulPartitionedCall")
    call.input.extend(argument.name for argument in signature.input_arg)
    types = [argument.type for argument in signature.input_arg]
    call.attr["Tin"].list.type.extend(types)
    call.attr["Tout"].list.SetInParent()
    call.attr["f"].func.name = name
    call.attr["config_proto"].s = as_written().SerializeToString()
    signature.is_stateful = True
    signature.control_output.append(call.name)
    definition.control_ret[call.name] = call.name
    return definition
