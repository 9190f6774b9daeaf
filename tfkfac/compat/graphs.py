"""Variables of one worker, graphs, tapes and gradients of TensorFlow."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import record as tape_record
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

T = TypeVar("T")


def state_variable(
    value: Any, dtype: Any, name: str, shape: Any = None
) -> tf.Variable:
    """Creates a non-trainable variable, also in the middle of a trace.

    Under a distribution strategy it is this worker's own: it is not mirrored,
    and other workers may have one of another shape or none.

    This relies on `ResourceVariable`, the class below `tf.Variable`, not
    asking the strategy who creates a variable.

    Args:
        value: Initial value, evaluated outside of any graph.
        dtype: Dtype of the variable.
        name: Name of the variable.
        shape: Shape, with None where sizes may change. Defaults to that of
            the value.

    Returns:
        A variable.
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


def repeat(
    body: Callable[[tf.Tensor, T], T],
    state: T,
    first: int | tf.Tensor,
    end: int | tf.Tensor,
) -> T:
    """Calls a function for each index of a range; a graph has it once.

    Collectives are legal in it. In a loop they agree across workers by the
    name of the loop, to which scopes and replicas add prefixes. So the loop
    is alone in a function of its own.

    This relies on names beginning anew in a function, and on the attribute
    `_noinline`, without which TensorFlow puts the operations back in the place
    of the call.

    Args:
        body: Function of the index, an int32 scalar, and of what it returned
            last: any nest of tensors, of fixed shapes and dtypes.
        state: What it gets first.
        first: The first index.
        end: The one after the last.
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

    function = tf.function(
        loop,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    return function(state, *(tf.cast(i, tf.int32) for i in (first, end)))


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

    def stamp() -> tf.Tensor:
        return tf.identity(variable.assign(tf.timestamp()))

    attributes = {"_noinline": True}
    return tf.function(
        stamp, autograph=False, experimental_attributes=attributes
    )()


def on_one_device() -> bool:
    """True if there is one device alone, on which nothing is compiled."""
    return len(tf.config.list_logical_devices()) == 1 and not in_xla()


def of_this_graph(
    tensor: tf.Tensor | tf.IndexedSlices,
) -> tf.Tensor | tf.IndexedSlices:
    """A tensor of the current graph: the one given, or an identity of it."""
    if tf.executing_eagerly():
        return tensor
    if tensor.graph is tf.compat.v1.get_default_graph():
        return tensor
    return tf.identity(tensor)


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
    return bool(tape_record.could_possibly_record())


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
    """True if TensorFlow takes the derivative of an operation for zero.

    It relies on `gradient_registry`, where an operation that is registered as
    not differentiable has None in the place of a function.

    Args:
        kind: Type of the operation.
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
