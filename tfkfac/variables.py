"""The optimizer's own state variables and event counters."""

import sys
from typing import Any

import tensorflow as tf


def state_variable(value: Any, dtype: Any, name: str) -> tf.Variable:
    """Creates a non-trainable variable, also in the middle of a trace.

    Args:
        value: Initial value, evaluated outside of any graph.
        dtype: Dtype of the variable.
        name: Name of the variable.

    Returns:
        A `tf.Variable`.
    """
    with tf.init_scope():
        return tf.Variable(value, trainable=False, dtype=dtype, name=name)


def count_event(
    happened: tf.Tensor, counter: tf.Variable, message: str
) -> None:
    """Counts something that should not happen and reports it the first time.

    Args:
        happened: Scalar bool.
        counter: Integer variable.
        message: What to say on standard error.
    """

    def report() -> tf.Tensor:
        tf.print("tfkfac:", message, output_stream=sys.stderr)
        return tf.constant(0)

    first = tf.logical_and(happened, tf.equal(counter, 0))
    tf.cond(first, report, lambda: tf.constant(0))
    counter.assign_add(tf.cast(happened, counter.dtype))
