"""Refusals of a running step, as errors of Python's.

A graph can only assert. Its error has the message somewhere in the middle, so
it bears a sign, by which `fit` finds it.
"""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

_SIGN = "tfkfac refuses: "
_TEXT = re.compile(rf"\[{_SIGN}(.*?)\]$", re.MULTILINE)


def refuse(condition: tf.Tensor, message: tf.Tensor) -> tf.Operation:
    """Ends a step with a message.

    Not where other replicas would wait in a collective.

    Args:
        condition: Whether to, a scalar.
        message: Why, a string of one line.

    Returns:
        What to wait for before anything that is refused.
    """
    text = tf.strings.join([_SIGN, message])
    return tf.debugging.Assert(tf.logical_not(condition), [text])


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Raises what a step in it has refused.

    Raises:
        ValueError: With the message.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _TEXT.search(error.message)
        if found is None:
            raise
        raise ValueError(found[1].replace('\\"', '"')) from error
