"""Updates of a Keras optimizer that equal variables have in common."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.graphs import on_one_device
from tfkfac.compat.together import Call, together


def update_steps(
    inner: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    variables: Sequence[keras.Variable],
    learning_rate: Any,
) -> None:
    """Does `update_step` of an optimizer for each variable.

    That of Keras' SGD is a dozen operations for each of them, and a fifth of
    what is traced of a step of many small layers. On one device those of
    variables of the same rank are shared calls.

    This relies on `SGD.update_step` asking itself for nothing but what `_One`
    has, or it raises, and on the `handle` of a mirrored variable being that of
    the replica.

    Args:
        inner: The optimizer.
        gradients: The gradients.
        variables: Their variables.
        learning_rate: The learning rate.
    """
    shares = type(inner) is keras.optimizers.SGD and on_one_device()
    if shares:  # read once, and not for each call
        learning_rate = tf.convert_to_tensor(learning_rate)
    calls = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if shares and isinstance(gradient, tf.Tensor):
            calls.append(_call(inner, gradient, variable, learning_rate))
        else:
            inner.update_step(gradient, variable, learning_rate)
    together(calls)


def _call(
    inner: keras.optimizers.SGD,
    gradient: tf.Tensor,
    variable: keras.Variable,
    learning_rate: Any,
) -> Call[tf.Tensor]:
    """The call that updates one variable."""
    momentums = []
    if inner.momentum != 0:
        place = inner._get_variable_index(variable)
        momentums = [inner.momentums[place].value]

    def update(
        gradient: tf.Tensor,
        variable: tf.Variable,
        momentums: Sequence[tf.Variable],
        rate: tf.Tensor,
    ) -> tf.Tensor:
        one = _One(inner, momentums)
        keras.optimizers.SGD.update_step(one, gradient, variable, rate)
        return tf.constant(True)  # a call returns something

    return Call(
        ("SGD", inner.momentum, inner.nesterov),
        update,
        (gradient, variable.value, momentums, learning_rate),
        any_size=True,
    )


class _One:
    """What `SGD.update_step` knows of an optimizer, with one variable."""

    def __init__(
        self, inner: keras.optimizers.SGD, momentums: Sequence[tf.Variable]
    ) -> None:
        self.momentum = inner.momentum
        self.nesterov = inner.nesterov
        self.momentums = momentums
        self.assign = inner.assign
        self.assign_add = inner.assign_add
        self.assign_sub = inner.assign_sub

    def _get_variable_index(self, _: tf.Variable) -> int:
        return 0
