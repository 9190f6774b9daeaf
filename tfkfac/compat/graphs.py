"""The optimizer's own state variables and event counters."""

from collections.abc import Callable
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
