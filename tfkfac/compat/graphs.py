"""Worker-local variables, and helpers for TensorFlow graphs and tapes."""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfkfac.compat.overrides import Below, overridden

try:
    from keras.src.backend.tensorflow import nn as keras_nn
except ImportError:  # from Keras 3.16 on
    from keras.src.backend.tensorflow.ops import nn as keras_nn

T = TypeVar("T")
Moments = tuple[tf.Tensor, tf.Tensor]  # mean and variance
Sum = Callable[[tf.Tensor], tf.Tensor]
# Operations whose outputs share the memory of their inputs.
VIEWS = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient")


def state_variable(
    value: Any, dtype: Any, name: str, shape: Any = None
) -> tf.Variable:
    """Create a non-trainable, worker-local variable; legal inside a trace.

    Other workers may have another shape, or no such variable. `shape`
    defaults to the shape of the value; None entries are sizes that may change.

    This relies on `ResourceVariable`, a base class of `tf.Variable`, ignoring
    the variable creators of a strategy.
    """
    with tf.init_scope():
        return ResourceVariable(
            tf.cast(value, dtype), trainable=False, name=name, shape=shape
        )


def in_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a function in a faster `tf.function` if executing eagerly."""
    if tf.executing_eagerly():
        return tf.function(function, autograph=False)
    return function


def not_inlined(
    function: Callable[..., Any], input_signature: Any = None
) -> Any:
    """Return a `tf.function` whose call stays one operation, by `_noinline`."""
    return tf.function(
        function,
        input_signature=input_signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


def repeat(
    body: Callable[[tf.Tensor, T], T],
    state: T,
    first: int | tf.Tensor,
    end: int | tf.Tensor,
) -> T:
    """Compute `state = body(index, state)` for `first <= index < end`.

    The state is a nest of tensors of fixed shapes and dtypes. The body may use
    collectives: TensorFlow matches collectives of a loop across workers by the
    name of the loop, which has no prefix inside a separate function.
    """

    def loop(state: T, first: tf.Tensor, end: tf.Tensor) -> T:
        # Iterations are sequential, because collectives need a fixed order.
        _, final_state = tf.while_loop(
            lambda index, _: index < end,
            lambda index, state: (index + 1, body(index, state)),
            [first, state],
            parallel_iterations=1,
            name="repeat",
        )
        return final_state

    bounds = (tf.cast(i, tf.int32) for i in (first, end))
    return not_inlined(loop)(state, *bounds)


def before_relu(tensor: tf.Tensor) -> tf.Tensor:
    """Return the input of a relu; return other or eager tensors unchanged."""
    if isinstance(tensor, ops.EagerTensor) or tensor.op.type != "Relu":
        return tensor
    return tensor.op.inputs[0]


def is_copy(tensor: tf.Tensor, source: tf.Tensor) -> bool:
    """True if a tensor is `source`, or a slice of it, reshaped or cast.

    In eager mode, True only for the same tensor.
    """
    while tensor is not source:
        if isinstance(tensor, ops.EagerTensor) or (
            tensor.op.type not in (*VIEWS, "Cast", "StridedSlice")
        ):
            return False
        tensor = tensor.op.inputs[0]
    return True


def in_xla() -> bool:
    """True if XLA compiles the trace, by `GraphOrParentsInXlaContext`."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def trace_place() -> tuple[tf.Graph | None, int]:
    """Return the current graph, and the depth of `tf.vectorized_map` in it.

    The graph is None in eager mode. This relies on `tf.vectorized_map` tracing
    its function in the name scope "loop_body" of the current graph.
    """
    if tf.executing_eagerly():
        return None, 0
    scopes = tf.get_current_name_scope().split("/")
    depth = sum(
        re.fullmatch(r"loop_body(_\d+)?", x) is not None for x in scopes
    )
    return tf.compat.v1.get_default_graph(), depth


def under_tape() -> bool:
    """True if a tape is active in this thread, by `could_possibly_record`."""
    return bool(record.could_possibly_record())


def open_graphs() -> Iterator[tf.Graph]:
    """Yield the current graph and its outer graphs; none in eager mode.

    This relies on the attribute `outer_graph`, which the outermost graph does
    not have, or where it has the empty graph of eager execution.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def graph_attribute(graph: tf.Graph, name: str, make: Callable[[], T]) -> T:
    """Return an attribute of a graph, created by `make` on first use."""
    if not hasattr(graph, name):
        setattr(graph, name, make())
    return getattr(graph, name)


def once_per_graph(key: Hashable, make: Callable[[], T]) -> T:
    """Return `make()`; a graph computes it once per key."""
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    values = graph_attribute(graph, "_tfkfac_values", dict)
    if key not in values:
        values[key] = make()
    return values[key]


def is_constant_to_tapes(op_type: str) -> bool:
    """True if `gradient_registry` has None for a type: derivative 0."""
    try:
        return gradient_registry.lookup(op_type) is None
    except LookupError:
        return False  # TensorFlow raises if the gradient is requested


def operation_without_gradient(error: LookupError) -> str:
    """Return the operation type named by a missing-gradient error.

    This relies on the error messages: the registry's message ends with the
    type, and the message of `PreventGradient` contains "disabled".
    """
    if "disabled" in str(error):
        return "PreventGradient"
    return str(error).rsplit(": ", 1)[-1].strip()


def is_legacy_gradient(operation: tf.Operation) -> bool:
    """True for the gradient of a loop over functions of TensorFlow 1.

    TensorFlow traces this gradient, but its operation `SymbolicGradient` fails
    when it runs. This relies on the attribute `body` of loops, on
    `_get_function` of a graph and on `cached_definition`.
    """
    if operation.type not in ("While", "StatelessWhile"):
        return False
    name = operation.get_attr("body").name
    nodes = operation.graph._get_function(name).cached_definition.node_def
    return any(node.op == "SymbolicGradient" for node in nodes)


# This relies on `tf.train.Checkpoint` finding variables in the attributes of an
# optimizer or `tf.Module`, and in lists and tuples there, but not in
# dictionaries.
Tracked: TypeAlias = tf.Module


def replica_copy(variable: Any) -> tf.Variable:
    """Return this replica's copy of a mirrored variable, else the variable.

    This relies on `_get_on_device_or_primary`, which only distributed variables
    have.
    """
    get = getattr(variable, "_get_on_device_or_primary", None)
    return variable if get is None else get()


def new_rows(count: int, length: int, dtype: tf.DType) -> tf.Tensor:
    """Return a zero matrix that `set_row` may overwrite in place."""
    if in_xla():
        return tf.zeros([count, length], dtype)
    # `tf.zeros` may be folded to a constant, which must not be overwritten.
    return tf.raw_ops.Empty(shape=[count, length], dtype=dtype, init=True)


def copied_rows(matrix: tf.Tensor) -> tf.Tensor:
    """Return a copy of a matrix that `set_row` may overwrite in place."""
    return matrix if in_xla() else tf.raw_ops.DeepCopy(x=matrix)


def set_row(matrix: tf.Tensor, index: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """Write a row of a matrix in place and return the matrix.

    `matrix` is a result of `new_rows`, `copied_rows` or `set_row`, and must
    not be used afterwards; `index` is int32. `tf.tensor_scatter_nd_update`
    would copy the matrix on a CPU.

    This relies on `InplaceUpdate` writing into its input, and on TensorFlow
    not folding `Empty` and `DeepCopy` to constants. XLA decides on copies.
    """
    if in_xla():
        return tf.tensor_scatter_nd_update(matrix, [[index]], row[None])
    return tf.raw_ops.InplaceUpdate(x=matrix, i=[index], v=row[None])


@contextlib.contextmanager
def written_variables() -> Iterator[list[tf.Tensor]]:
    """Collect the handles of the variables that are written in this context.

    Keras' stateless scopes cover Keras variables only, not a `tf.Variable` or
    `tf.random.Generator` that a loss uses.

    In a graph this relies on `get_read_write_resource_inputs`, which also looks
    into called functions. In eager mode it relies on the names of variables'
    methods, "assign*" and "scatter*", and on `_prepare_key_counter` of
    generators, which every draw calls.
    """
    handles: list[tf.Tensor] = []
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield handles
        find = auto_control_deps_utils.get_read_write_resource_inputs
        for operation in graph.get_operations()[first:]:
            for handle in find(operation)[1]:
                _append_variable(handles, _outermost(handle))
        return

    def record_write(
        below: Below, /, owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_generator = isinstance(owner, tf.random.Generator)
        variable = owner.state if is_generator else owner
        _append_variable(handles, variable.handle)
        return below(owner, *args, **kwargs)

    # Override both classes: a decorator of the subclass `ResourceVariable`
    # copies the methods of `BaseResourceVariable`.
    base = resource_variable_ops.BaseResourceVariable
    writes = [
        (owner, name)
        for owner in (ResourceVariable, base)
        for name in vars(owner)
        if name.startswith(("assign", "scatter_", "batch_scatter_"))
    ]
    writes.append((tf.random.Generator, "_prepare_key_counter"))
    with contextlib.ExitStack() as stack:
        for owner, name in writes:
            stack.enter_context(overridden(owner, name, record_write))
        yield handles


def _outermost(handle: tf.Tensor) -> tf.Tensor:
    """Return the original of a handle that nested functions captured.

    Otherwise two placeholders of a variable would count as two variables.
    """
    while not isinstance(handle, ops.EagerTensor):
        captures = getattr(handle.graph, "captures", ())
        outer_handles = [outer for outer, inner in captures if inner is handle]
        if not outer_handles:
            break
        (handle,) = outer_handles
    return handle


def _append_variable(handles: list[tf.Tensor], handle: tf.Tensor) -> None:
    """Append a handle of a variable that is not listed yet."""
    is_listed = any(handle is listed for listed in handles)
    if not is_listed and _variable_dtype(handle) is not None:
        handles.append(handle)


def _variable_dtype(handle: tf.Tensor) -> tf.DType | None:
    """Return the dtype of a handle's variable; None for other resources."""
    data = resource_variable_ops.get_eager_safe_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


@contextlib.contextmanager
def kept_variables(handles: Sequence[tf.Tensor]) -> Iterator[None]:
    """Restore variables on exit, given handles of `written_variables`."""
    before = [
        tf.raw_ops.ReadVariableOp(resource=h, dtype=_variable_dtype(h))
        for h in handles
    ]
    try:
        yield
    finally:
        for handle, value in zip(handles, before, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


@contextlib.contextmanager
def nonzero_variables(captured: Sequence[tf.Tensor]) -> Iterator[None]:
    """Set captured scalar variables that are 0 to 1; restore them on exit.

    Example: a weight in a loss that grows from 0 during training.
    """
    handles = []
    for x in captured:
        dtype = _variable_dtype(x) if x.dtype == tf.resource else None
        if dtype is not None and dtype.is_floating:
            value = tf.raw_ops.ReadVariableOp(resource=x, dtype=dtype)
            if value.shape.rank == 0 and float(value) == 0:
                handles.append(x)
    with kept_variables(handles):
        for x in handles:
            ones = tf.ones([], _variable_dtype(x))
            tf.raw_ops.AssignVariableOp(resource=x, value=ones)
        yield


def written_in(graph: tf.Graph) -> list[tf.Tensor]:
    """Return handles of the variables that a graph writes.

    This relies on `get_read_write_resource_inputs`, and on `_get_function` for
    the graphs of called functions.

    Raises:
        ValueError: If the graph has other effects, such as a print.
    """
    handles: list[tf.Tensor] = []
    find = auto_control_deps_utils.get_read_write_resource_inputs
    for operation in graph.get_operations():
        reads, writes = find(operation)
        for handle in writes:
            _append_variable(handles, _outermost(handle))
        attributes = operation.node_def.attr.values()
        called = [x.func.name for x in attributes if x.HasField("func")]
        for name in called:
            written_in(graph._get_function(name).graph)
        is_stateful = operation.op_def.is_stateful and not called
        is_allowed = operation.type in ("Placeholder", "Assert")
        if is_stateful and not (reads or writes or is_allowed):
            raise ValueError(f"Operation {operation.name} has effects.")
    return handles


def with_gradient(
    function: Callable[[tf.Tensor], tf.Tensor],
    tensor: tf.Tensor,
    gradient: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Apply a function to a tensor with a custom gradient for tapes.

    In a graph `tf.custom_gradient` adds its arguments to a registry of the
    process and never removes them, so graphs and models would leak. The
    gradient of an enclosing `tf.function`, taken from outside, ignores the
    custom gradient.

    This relies on `stop_recording` and `record_operation`, which
    `tf.custom_gradient` calls as well.
    """
    with record.stop_recording():
        # Add an identity: a tape needs a result other than the argument.
        result = tf.identity(function(tensor))
    record.record_operation(
        "with_gradient", [result], [tensor], lambda g: [gradient(g)]
    )
    return result


@contextlib.contextmanager
def exact_second_derivatives(total: Sum) -> Iterator[None]:
    """Make batch moments twice differentiable in this thread.

    `tf.nn.moments` before TensorFlow 2.22 stops the gradient of the mean inside
    the variance: the second derivative is wrong by several percent. Moments
    that are synchronised over replicas use a reduction that is illegal inside a
    `tf.cond`; `total`, a differentiable sum over replicas, replaces it.

    This relies on Keras calling `tf.nn.moments`, and for synchronised moments
    `_compute_moments_sync` of its module `nn`, through the modules' attributes.
    """

    def synchronized(
        _: Any, x: tf.Tensor, axes: Sequence[int], keepdims: bool
    ) -> Moments:
        sums = [
            tf.reduce_sum(value, axes, keepdims=keepdims)
            for value in (tf.ones_like(x), x, tf.square(x))
        ]
        count, sum_x, sum_xx = tf.unstack(total(tf.stack(sums)))
        mean = tf.math.divide_no_nan(sum_x, count)
        mean_square = tf.math.divide_no_nan(sum_xx, count)
        return mean, tf.maximum(mean_square - tf.square(mean), 0)

    with (
        overridden(tf.nn, "moments", _plain_moments),
        overridden(keras_nn, "_compute_moments_sync", synchronized),
    ):
        yield


def _plain_moments(
    _: Any,
    x: tf.Tensor,
    axes: Any,
    shift: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Moments:
    """Mean and variance in two passes; arguments as `tf.nn.moments`."""
    wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    variance = tf.reduce_mean(tf.square(wide - mean), axes, keepdims=keepdims)
    if not keepdims:
        mean = tf.reduce_mean(wide, axes)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)
