"""Variables of one worker, graphs, tapes and gradients of TensorFlow."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfkfac.compat.overrides import overridden

try:
    from keras.src.backend.tensorflow import nn as keras_nn
except ImportError:  # from Keras 3.16 on
    from keras.src.backend.tensorflow.ops import nn as keras_nn

T = TypeVar("T")
Sum = Callable[[tf.Tensor], tf.Tensor]
Moments = tuple[tf.Tensor, tf.Tensor]  # mean and variance
# Operations that make nothing new.
_VIEWS = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient")


def state_variable(
    value: Any, dtype: Any, name: str, shape: Any = None
) -> tf.Variable:
    """Creates a non-trainable variable, also in the middle of a trace.

    Under a distribution strategy it is this worker's own: it is not mirrored,
    and other workers may have one of another shape or none. `shape` has None
    where sizes may change, and is that of the value by default.

    This relies on `ResourceVariable`, the class below `tf.Variable`, not
    asking the strategy who creates a variable.
    """
    with tf.init_scope():
        return ResourceVariable(
            tf.cast(value, dtype), trainable=False, name=name, shape=shape
        )


def zeros_variable(shape: Sequence[int], dtype: Any, name: str) -> tf.Variable:
    """A `state_variable` of zeros, made without an array of them."""
    with tf.init_scope():
        return state_variable(tf.zeros(shape, dtype), dtype, name)


def in_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Traces a function where TensorFlow runs eagerly.

    Graphs know the layers that operations belong to, for messages, and run
    long computations faster.
    """
    if tf.executing_eagerly():
        return tf.function(function, autograph=False)
    return function


def not_inlined(
    function: Callable[..., Any], input_signature: Any = None
) -> Any:
    """A `tf.function` that is one operation of the graph that calls it.

    It relies on the attribute `_noinline`, without which TensorFlow puts the
    operations back in the place of the call.
    """
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
    """Calls a function for each index of a range; a graph has it once.

    It gets the index, an int32 scalar, and what it returned last: any nest of
    tensors, of fixed shapes and dtypes. Collectives are legal in it. In a loop
    they agree across workers by the name of the loop, to which scopes and
    replicas add prefixes. So the loop is alone in a function of its own.

    This relies on names beginning anew in a function.
    """

    def loop(state: T, first: tf.Tensor, end: tf.Tensor) -> T:
        # One after the other, as the collectives are.
        _, last = tf.while_loop(
            lambda index, _: index < end,
            lambda index, state: (index + 1, body(index, state)),
            [first, state],
            parallel_iterations=1,
            name="repeat",
        )
        return last

    bounds = (tf.cast(i, tf.int32) for i in (first, end))
    return not_inlined(loop)(state, *bounds)


def map_rows(
    function: Callable[[tf.Tensor], tf.Tensor], rows: tf.Tensor
) -> tf.Tensor:
    """`tf.map_fn` that leaves nothing behind if the function raises.

    Only in graphs. TensorFlow gives the default variable scope a caching
    device for the time of the tracing and does not take it back then; no
    strategy could enter that scope any more.
    """
    scope = tf.compat.v1.get_variable_scope()
    before = scope.caching_device
    try:
        return tf.map_fn(function, rows)
    finally:
        scope.set_caching_device(before)


def stamp_time(variable: tf.Variable) -> tf.Tensor:
    """Writes the time in seconds to a float64 variable and returns it.

    The plain operation would wait for that of other replicas in the same
    process, since TensorFlow orders operations with a side effect on nothing.
    A call that is not inlined is one operation by itself.
    """
    return not_inlined(lambda: tf.identity(variable.assign(tf.timestamp())))()


def of_this_graph(
    tensor: tf.Tensor | tf.IndexedSlices,
) -> tf.Tensor | tf.IndexedSlices:
    """A tensor of the current graph: the one given, or an identity of it."""
    if tf.executing_eagerly():
        return tensor
    if tensor.graph is tf.compat.v1.get_default_graph():
        return tensor
    return tf.identity(tensor)


def numbers_made(
    function: Callable[..., Any], arguments: Sequence[tf.TensorSpec]
) -> int:
    """Number of numbers that a function makes of its arguments.

    Sizes that only a run knows count nothing.
    """
    traced = tf.function(function, autograph=False)
    graph = traced.get_concrete_function(*arguments)
    known = {given.ref() for given in graph.inputs[: len(arguments)]}
    count = 0
    for operation in graph.graph.get_operations():
        if any(given.ref() in known for given in operation.inputs):
            known.update(made.ref() for made in operation.outputs)
            if operation.type not in _VIEWS:
                sizes = [x.shape.num_elements() for x in operation.outputs]
                count += sum(size or 0 for size in sizes)
    return count


def in_xla() -> bool:
    """True if the current trace is one that XLA compiles.

    It relies on `GraphOrParentsInXlaContext`, which TensorFlow's own control
    flow asks.
    """
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def under_tape() -> bool:
    """True if this thread is inside of a gradient tape or an accumulator.

    It relies on `tensorflow.python.eager.record`, which TensorFlow asks before
    it records an operation.
    """
    return bool(record.could_possibly_record())


def open_graphs() -> Iterator[tf.Graph]:
    """The current graph and those around it; none when running eagerly.

    It relies on the `outer_graph` of the graph of a function or a branch. The
    outermost one has none, or is the empty graph of eager execution.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def is_constant_to_tapes(kind: str) -> bool:
    """True if TensorFlow takes the derivative of a type of operation for zero.

    It relies on `gradient_registry`, where an operation that is registered as
    not differentiable has None in the place of a function.
    """
    try:
        return gradient_registry.lookup(kind) is None
    except LookupError:
        return False  # an error of TensorFlow's own, if it is needed


def operation_without_gradient(error: LookupError) -> str:
    """The type of the operation that a tape found no gradient for.

    It relies on the messages: that of the registry ends with the type, and
    that of `PreventGradient` says "disabled".
    """
    if "disabled" in str(error):
        return "PreventGradient"
    return str(error).rsplit(": ", 1)[-1].strip()


if TYPE_CHECKING:

    class Tracked:
        """`tf.Module` to a type checker, which would check nothing of it."""

        variables: Sequence[tf.Variable]

        def __init__(self, name: str | None = None) -> None: ...

else:
    # This relies on `tf.train.Checkpoint` following the attributes of an
    # optimizer and of a `tf.Module`, and lists and tuples of them, to the
    # variables in them; dictionaries it leaves out.
    Tracked = tf.Module


def own_copy(variable: Any) -> tf.Variable:
    """This replica's copy of a mirrored variable.

    It relies on `_get_on_device_or_primary` of a distributed variable; another
    variable, which has no such method, is its own copy.
    """
    get = getattr(variable, "_get_on_device_or_primary", None)
    return variable if get is None else get()


def new_rows(count: int, length: int, dtype: tf.DType) -> tf.Tensor:
    """A matrix of zeros for `set_row`."""
    if in_xla():
        return tf.zeros([count, length], dtype)
    # What `tf.zeros` makes may be a constant, which is kept for other runs.
    return tf.raw_ops.Empty(shape=[count, length], dtype=dtype, init=True)


def copied_rows(matrix: tf.Tensor) -> tf.Tensor:
    """A copy for `set_row` of what is kept elsewhere, as in a variable."""
    return matrix if in_xla() else tf.raw_ops.DeepCopy(x=matrix)


def set_row(matrix: tf.Tensor, index: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """Returns a matrix with another row; that given must not be used again.

    The matrix is what `new_rows`, `copied_rows` or this function returned, the
    index int32. `tf.tensor_scatter_nd_update` copies the matrix on a CPU.

    This relies on `InplaceUpdate` writing into the tensor it is given, and on
    TensorFlow making no constant of what `Empty` and `DeepCopy` return. XLA
    decides by itself what it copies.
    """
    if in_xla():
        return tf.tensor_scatter_nd_update(matrix, [[index]], row[None])
    return tf.raw_ops.InplaceUpdate(x=matrix, i=[index], v=row[None])


# Both, as TensorFlow's decorator of the first has copies of the methods.
_VARIABLES = (
    resource_variable_ops.ResourceVariable,
    resource_variable_ops.BaseResourceVariable,
)


@contextlib.contextmanager
def written_variables() -> Iterator[list[tf.Tensor]]:
    """Notes the handles of the variables that are written inside.

    Keras' own are known to its stateless scopes; this is for a
    `tf.Variable` or a `tf.random.Generator` that a loss keeps.

    In a graph this relies on `get_read_write_resource_inputs`, by which
    TensorFlow orders what reads and writes a resource, and which looks into
    the functions that an operation calls. Outside of graphs it relies on the
    methods of variables that begin with "assign" and "scatter", and on
    `_prepare_key_counter` of generators, by which all that draws numbers
    prepares them.
    """
    handles: list[tf.Tensor] = []
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield handles
        find = auto_control_deps_utils.get_read_write_resource_inputs
        for operation in graph.get_operations()[first:]:
            for handle in find(operation)[1]:
                _add(handles, _outermost(handle))
        return

    def note(
        below: Callable[..., Any], /, owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_generator = isinstance(owner, tf.random.Generator)
        _add(handles, (owner.state if is_generator else owner).handle)
        return below(owner, *args, **kwargs)

    writes = [
        (owner, name)
        for owner in _VARIABLES
        for name in vars(owner)
        if name.startswith(("assign", "scatter_", "batch_scatter_"))
    ]
    writes.append((tf.random.Generator, "_prepare_key_counter"))
    with contextlib.ExitStack() as stack:
        for owner, name in writes:
            stack.enter_context(overridden(owner, name, note))
        yield handles


def _outermost(handle: tf.Tensor) -> tf.Tensor:
    """The handle outside of all functions that a captured one stands for.

    Two placeholders of one variable in one graph would be two variables to
    what orders operations. This relies on `captures` of a function's graph.
    """
    while not isinstance(handle, ops.EagerTensor):
        captures = getattr(handle.graph, "captures", ())
        outside = [own for own, inner in captures if inner is handle]
        if not outside:
            break
        (handle,) = outside
    return handle


def _add(handles: list[tf.Tensor], handle: tf.Tensor) -> None:
    """Adds the handle of a variable, if it is one and not there yet."""
    known = any(handle is one for one in handles)
    if not known and _kind(handle) is not None:
        handles.append(handle)


def _kind(handle: tf.Tensor) -> tf.DType | None:
    """The dtype of the variable of a handle; None of another resource."""
    data = resource_variable_ops.get_eager_safe_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


@contextlib.contextmanager
def kept_variables(handles: Sequence[tf.Tensor]) -> Iterator[None]:
    """Gives variables back their values, by handles of `written_variables`."""
    before = [
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=_kind(handle))
        for handle in handles
    ]
    try:
        yield
    finally:
        for handle, value in zip(handles, before, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def has_effects(graph: tf.Graph) -> bool:
    """True if a graph does anything but compute, and read variables.

    It relies on what TensorFlow says of the types of operations.
    """
    reads = auto_control_deps_utils.RESOURCE_READ_OPS
    return any(
        operation.op_def.is_stateful and operation.type not in reads
        for operation in graph.get_operations()
        if operation.type != "Placeholder"
    )


def with_gradient(
    function: Callable[[tf.Tensor], tf.Tensor],
    tensor: tf.Tensor,
    gradient: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Applies a function to a tensor; on tapes its gradient is another's.

    In a graph `tf.custom_gradient` enters what it was called with into a
    registry of the process, for good: the graph, all functions that hang on
    it and its model's records are never freed. Tapes do not need the registry;
    gradients through a whole `tf.function`, which do, are the function's own.

    It relies on `stop_recording` and `record_operation` of TensorFlow's
    `record`, which `tf.custom_gradient` calls as well.
    """
    with record.stop_recording():
        # A tape cannot tell a result that is the argument itself from it.
        result = tf.identity(function(tensor))
    record.record_operation(
        "with_gradient", [result], [tensor], lambda g: [gradient(g)]
    )
    return result


@contextlib.contextmanager
def exact_second_derivatives(total: Sum) -> Iterator[None]:
    """Gives the code that this thread traces inside right second derivatives.

    `tf.nn.moments` stops the gradient of the mean within the variance. That
    leaves the first derivative as it is and makes the second one wrong by
    several percent. Moments that are synchronised over replicas reduce in a
    way that is illegal inside a `tf.cond`; `total` is a differentiable sum
    over the replicas.

    This relies on Keras calling `tf.nn.moments`, and for synchronised moments
    `_compute_moments_sync` of its module `nn`, through the modules'
    attributes, where a layer of the user's own is likely to look as well. Both
    are as they were when no thread is inside.
    """

    def synchronized(
        _: Any, x: tf.Tensor, axes: Sequence[int], keepdims: bool
    ) -> Moments:
        sums = [
            tf.reduce_sum(value, axes, keepdims=keepdims)
            for value in (tf.ones_like(x), x, tf.square(x))
        ]
        count, first, second = tf.unstack(total(tf.stack(sums)))
        mean = tf.math.divide_no_nan(first, count)
        square = tf.math.divide_no_nan(second, count)
        return mean, tf.maximum(square - tf.square(mean), 0)

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
    """Mean and variance without tricks; arguments as `tf.nn.moments`."""
    wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    variance = tf.reduce_mean(tf.square(wide - mean), axes, keepdims=keepdims)
    if not keepdims:
        mean = tf.reduce_mean(wide, axes)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)
