"""Trace a per-layer function once per graph and call it for every layer."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.atomic_function import (
    AtomicFunction,
)
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework.ops import set_int_list_attr

from tfkfac.compat.graphs import (
    graph_attribute,
    in_xla,
    not_inlined,
    open_graphs,
)

T = TypeVar("T")


class TraceKey(NamedTuple):
    """Key under which calls share one traced function.

    Attributes:
        key: A hashable value. It differs between calls that need different
            operations for arguments of equal shapes and dtypes.
        any_size: True if the function works for tensors of any size.
    """

    key: Hashable
    any_size: bool = True


def shared_call(
    key: Hashable,
    function: Callable[..., T],
    *args: Any,
    any_size: bool = False,
    placed: bool = False,
) -> T:
    """Call a function that is traced once per graph and key.

    The first call traces the function. Later calls with an equal key, equal
    constants, and tensors of equal shapes and dtypes add one call operation to
    the graph. In eager mode this is a plain call. Traces live as long as the
    outermost graph.

    This relies on `inference_fn` of a concrete function. Calling it directly
    skips the checks of arguments, which take most of the time that a
    `tf.function` needs for a call. It also relies on a graph accepting names of
    added functions as operation types, and on `function_call_options`. On one
    device, all operations of the function must be on the caller's device.

    Args:
        key: Cache key of the function, in addition to the arguments. None to
            call the function without sharing its trace.
        function: The function. It must use only tensors that are arguments,
            and no collectives.
        args: Tensors, or nests of these. Ranks must be known if `any_size`.
        any_size: True to trace once for all sizes. Static sizes of the results
            are then unknown; the caller can restore them with `set_shape`.
        placed: True to call by `PartitionedCall`, to which TensorFlow applies
            all graph passes. Convolutions then use oneDNN's kernels, 3 to 5
            times faster, at the cost of a slower first step.
    """
    graphs = [graph for graph in open_graphs() if graph.building_function]
    if not graphs or key is None:
        return function(*args)
    traces = graph_attribute(graphs[-1], "_tfkfac_shared_functions", dict)
    tensors = [tf.convert_to_tensor(x) for x in tf.nest.flatten(args)]
    specs = [
        tf.TensorSpec([None] * x.shape.rank if any_size else x.shape, x.dtype)
        for x in tensors
    ]
    full_key = key, *specs
    if full_key not in traces:
        structure = tf.nest.map_structure(lambda _: None, args)

        def flat(*tensors: tf.Tensor) -> T:
            return function(*tf.nest.pack_sequence_as(structure, tensors))

        traces[full_key] = not_inlined(flat, specs).get_concrete_function()
    traced = traces[full_key]
    body = traced.inference_fn
    if _on_one_device() and not placed:
        # Call by an operation whose type is the name of the function, for which
        # TensorFlow creates one kernel. A `PartitionedCall` would place and
        # partition the function, and all functions that it calls, when it first
        # runs: a tenth of the time of the first step.
        graph = tf.compat.v1.get_default_graph()
        graph._add_function_recursive(body)
        signature = body.cached_definition.signature
        results = body.function_type.flat_outputs
        dtypes = [spec.dtype for spec in results]
        operation = graph._create_op_internal(
            signature.name, tensors, dtypes, name="Call", op_def=signature
        )
        outputs = list(operation.outputs)
        for output, spec in zip(outputs, results, strict=True):
            output.set_shape(spec.shape)
    else:
        # A call in a graph takes its `config_proto` from these options.
        thread_context = context.context()
        before = thread_context.function_call_options
        thread_context.function_call_options = context.FunctionCallOptions(
            before.executor_type, _unoptimized_config()
        )
        try:
            outputs = body.call_flat(*tensors)
        finally:
            thread_context.function_call_options = before
    return tf.nest.pack_sequence_as(traced.structured_outputs, outputs)


def _on_one_device() -> bool:
    """True if there is one device and the trace is not compiled by XLA."""
    return len(tf.config.list_logical_devices()) == 1 and not in_xla()


def _unoptimized_config() -> tf.compat.v1.ConfigProto:
    """Config that disables graph optimisation of a called function.

    TensorFlow would optimise each function separately before its first run,
    which takes some milliseconds and gains almost nothing.
    """
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def when(predicate: tf.Tensor, do: Callable[[], object]) -> list[tf.Operation]:
    """Run `do` for its side effects if a predicate is true.

    A `tf.cond` copies each captured tensor into both branches and adds three
    operations per tensor when it is lowered: half of the nodes of a K-FAC step.
    Here the branch stays a function, and the other branch is empty.

    With several devices or XLA, the `If` operation is lowered as in `tf.cond`,
    because its kernel needs all inputs on one device. The branch then calls the
    function. Read-only variables are marked, so that branches of two replicas
    do not wait for each other.

    This relies on the operation `If` accepting functions that are built from a
    `FunctionDef`, and on `captured_inputs` of a traced function.

    Args:
        predicate: Scalar bool tensor.
        do: The function to run. It may use collectives. Its result is dropped.

    Returns:
        The operations to wait for until `do` has run; empty in eager mode.
    """
    if tf.executing_eagerly():
        if predicate:
            do()
        return []

    def body() -> None:
        do()

    # Name the function after `do`, for profiles and graphs.
    body.__name__ = getattr(do, "__name__", "branch").strip("<>")
    function = not_inlined(body).get_concrete_function()
    name = function.name.decode()
    graph = tf.compat.v1.get_default_graph()
    graph._add_function_recursive(function.inference_fn)
    # Keep the function: an export of the graph looks up the branch's graph.
    graph_attribute(graph, "_tfkfac_branches", list).append(function)
    one_device = _on_one_device()
    condition = tf.raw_ops.If(
        cond=predicate,
        input=function.captured_inputs,
        Tout=[],
        then_branch=(
            name if one_device else _add_branch(f"{name}_called", function)
        ),
        else_branch=_add_branch(f"{name}_otherwise", function, empty=True),
    )
    # Mark variables that the branch only reads: other reads need not wait.
    find = auto_control_deps_utils.get_read_only_resource_input_indices_graph
    set_int_list_attr(
        condition,
        auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR,
        [1 + index for index in find(function.graph)],  # input 0: predicate
    )
    condition._set_attr(
        "_lower_using_switch_merge", tf.compat.v1.AttrValue(b=not one_device)
    )
    return [condition]


def _add_branch(name: str, function: Any, empty: bool = False) -> str:
    """Add a branch to the graph that calls `function`, or is empty."""
    definition = FunctionDef()
    signature = definition.signature
    signature.name = name
    types = [t.dtype.as_datatype_enum for t in function.captured_inputs]
    for i, input_type in enumerate(types):
        signature.input_arg.add(name=f"x{i}", type=input_type)
    if not empty:
        call = definition.node_def.add(name="call")
        call.op = "StatefulPartitionedCall"
        call.input.extend(argument.name for argument in signature.input_arg)
        call.attr["Tin"].list.type.extend(types)
        call.attr["Tout"].list.SetInParent()
        call.attr["f"].func.name = function.name.decode()
        call.attr["config_proto"].s = _unoptimized_config().SerializeToString()
        signature.is_stateful = True
        signature.control_output.append(call.name)
        definition.control_ret[call.name] = call.name
    context.context().add_function_def(definition)
    atomic = AtomicFunction(
        name,
        context.context(),
        function.function_type,
        [function.inference_fn],
        cached_graph=function.graph,
    )
    tf.compat.v1.get_default_graph()._add_function_recursive(atomic)
    return name
