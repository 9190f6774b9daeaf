"""Updates of an inner optimizer within one replica, without merging."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer


@contextlib.contextmanager
def updates_in_replica(
    inner: keras.optimizers.Optimizer,
    after: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Lets an optimizer update this replica's copies of the variables.

    Keras goes from the replicas to one merged context for each update, which
    is illegal inside a `tf.cond`, and reduces the gradients once more there.
    With gradients that are reduced already every replica does the same update
    on its own copies, which stay equal. Accumulation, averaging, clipping and
    weight decay then are what they are in a single process.

    Args:
        inner: The optimizer whose `apply` is called inside.
        after: Called where it has updated the weights, before averages and
            constraints; with accumulation, in the steps that do an update.
    """
    iterations = inner._iterations

    def update_step(grads: Any, variables: Any, learning_rate: Any) -> None:
        for gradient, variable in zip(grads, variables, strict=True):
            inner.update_step(gradient, variable, learning_rate)
        if after is not None:
            after()

    def accumulate(grads: Any, accumulators: Any) -> None:
        for gradient, accumulator in zip(grads, accumulators, strict=True):
            accumulator.assign(accumulator + gradient)

    def overwrite(variables: Sequence[keras.Variable]) -> None:
        averages = inner._model_variables_moving_average
        for variable, average in zip(variables, averages, strict=True):
            variable.assign(average)

    def decay(variables: Sequence[keras.Variable]) -> None:
        BaseOptimizer._apply_weight_decay(inner, variables)

    def count(delta: Any) -> None:
        own = own_copy(iterations.value)
        own.assign_add(tf.cast(delta, own.dtype))

    substitutes = {
        "_backend_update_step": update_step,
        "_backend_increment_gradient_accumulators": accumulate,
        "_overwrite_model_variables_with_average_value": overwrite,
        "_apply_weight_decay": decay,
    }
    for name, function in substitutes.items():
        object.__setattr__(inner, name, function)
    object.__setattr__(iterations, "assign_add", count)
    try:
        yield
    finally:
        for name in substitutes:
            object.__delattr__(inner, name)
        object.__delattr__(iterations, "assign_add")


def own_copy(variable: Any) -> tf.Variable:
    """This replica's copy of a mirrored variable."""
    get = getattr(variable, "_get_on_device_or_primary", None)
    return variable if get is None else get()
