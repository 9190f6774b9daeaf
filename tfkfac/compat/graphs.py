"""The optimizer's own state variables and event counters."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def state_variable(value: Any, dtype: Any, name: str) -> tf.Variable:
    """Creates a non-trainable variable, also in the middle of a trace.

    Under a distribution strategy it is this worker's own: it is not mirrored,
    and other workers may have one of another shape or none.

    Args:
        value: Initial value, evaluated outside of any graph.
        dtype: Dtype of the variable.
        name: Name of the variable.

    Returns:
        A variable.
    """
    with tf.init_scope():
        return ResourceVariable(
            tf.cast(value, dtype), trainable=False, name=name
        )


def in_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Traces a function where TensorFlow runs eagerly.

    Graphs know the layers that operations belong to, for messages, and run
    long computations faster.
    """
    if tf.executing_eagerly():
        return tf.function(function, autograph=False)
    return function


def called_often(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a graph call a function, instead of repeating its operations.

    A loop would do, but for collectives: they agree across workers in a
    function only.
    """
    if tf.executing_eagerly():
        return function
    return tf.function(
        function,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


def stamp_time(variable: tf.Variable) -> tf.Tensor:
    """Writes the time in seconds to a float64 variable and returns it.

    The plain operation would wait for that of other replicas in the same
    process, since TensorFlow orders operations with a side effect on nothing.
    """

    def stamp() -> tf.Tensor:
        return tf.identity(variable.assign(tf.timestamp()))

    attributes = {"_noinline": True}
    return tf.function(
        stamp, autograph=False, experimental_attributes=attributes
    )()


def in_xla() -> bool:
    """Whether the current trace is one that XLA compiles."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def count_events(
    happened: Sequence[tf.Tensor],
    counters: Sequence[tf.Variable],
    names: Sequence[str],
    message: str,
) -> None:
    """Counts things that should not happen and reports the first of each.

    XLA, which Keras compiles a step with on a GPU, knows no strings and cannot
    print: what it compiles only counts.

    Args:
        happened: A scalar bool for each name.
        counters: An integer variable for each name.
        names: What it happened to.
        message: What to say of the names on standard error.
    """
    if not names:
        return
    flags = tf.stack(list(happened))
    new = tf.logical_and(flags, tf.equal(tf.stack(list(counters)), 0))

    def report() -> tf.Tensor:
        which = tf.boolean_mask(tf.constant(list(names)), new)
        which = tf.strings.reduce_join(which, separator=", ")
        text = tf.strings.join(["tfkfac: ", which, f": {message}"])
        tf.print(text, output_stream=sys.stderr)
        return tf.constant(0)

    if not in_xla():
        tf.cond(tf.reduce_any(new), report, lambda: tf.constant(0))
    for flag, counter in zip(happened, counters, strict=True):
        counter.assign_add(tf.cast(flag, counter.dtype))
