"""Updates of an inner optimizer within one replica, without merging."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfkfac.compat.optimizers import raw_iterations
from tfkfac.compat.overrides import Wrapper, overridden

# TensorFlow has kernels of SGD for others too, not everywhere on GPUs.
_DTYPES = (tf.float32, tf.float64)


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

    This relies on `BaseOptimizer.apply` doing what touches variables through
    these five methods, called by name on the optimizer and on its counter of
    iterations: `_backend_update_step(grads, variables, learning_rate)` once an
    update, with gradients already clipped and averaged over an accumulation,
    `_backend_increment_gradient_accumulators`, `_apply_weight_decay`,
    `_overwrite_model_variables_with_average_value` and `assign_add`. Averages
    are in `_model_variables_moving_average`, in the order of the variables,
    and `BaseOptimizer` has a weight decay of its own that stays in a replica.

    Args:
        inner: The optimizer whose `apply` is called inside.
        after: Called where it has updated the weights, before averages and
            constraints; with accumulation, in the steps that do an update.
    """
    iterations = raw_iterations(inner)

    def update_step(
        _: Any, grads: Any, variables: Any, learning_rate: Any
    ) -> None:
        rate = tf.convert_to_tensor(learning_rate)  # read once
        for gradient, variable in zip(grads, variables, strict=True):
            update_variable(inner, gradient, variable, rate)
        if after is not None:
            after()

    def accumulate(_: Any, grads: Any, accumulators: Any) -> None:
        for gradient, accumulator in zip(grads, accumulators, strict=True):
            accumulator.assign(accumulator + gradient)

    def overwrite(_: Any, variables: Sequence[keras.Variable]) -> None:
        averages = inner._model_variables_moving_average
        for variable, average in zip(variables, averages, strict=True):
            variable.assign(average)

    def decay(_: Any, variables: Sequence[keras.Variable]) -> None:
        BaseOptimizer._apply_weight_decay(inner, variables)

    def count(_: Any, delta: Any) -> None:
        own = own_copy(iterations.value)
        own.assign_add(tf.cast(delta, own.dtype))

    substitutes: dict[str, Wrapper] = {
        "_backend_update_step": update_step,
        "_backend_increment_gradient_accumulators": accumulate,
        "_overwrite_model_variables_with_average_value": overwrite,
        "_apply_weight_decay": decay,
    }
    with contextlib.ExitStack() as stack:
        for name, function in substitutes.items():
            stack.enter_context(overridden(inner, name, function))
        stack.enter_context(overridden(iterations, "assign_add", count))
        yield


def update_variable(
    inner: keras.optimizers.Optimizer,
    gradient: tf.Tensor | tf.IndexedSlices,
    variable: keras.Variable,
    learning_rate: tf.Tensor,
) -> None:
    """Does `update_step` of an optimizer for this replica's copy of a variable.

    That of Keras' SGD is a dozen operations, which pass over the variable four
    times. TensorFlow has a kernel that does it in one pass, with the same bits.

    This relies on `SGD.update_step` doing the update of that kernel, with the
    momentum in `momentums` at `_get_variable_index`.

    Args:
        inner: The optimizer.
        gradient: The gradient.
        variable: The variable.
        learning_rate: The learning rate.
    """
    own = own_copy(variable.value)
    plain = type(inner) is keras.optimizers.SGD and own.dtype in _DTYPES
    if not plain or not isinstance(gradient, tf.Tensor):
        inner.update_step(gradient, variable, learning_rate)
        return
    gradient = tf.cast(gradient, own.dtype)
    rate = tf.cast(learning_rate, own.dtype)
    if inner.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=own.handle, alpha=rate, delta=gradient
        )
        return
    place = inner._get_variable_index(variable)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=own.handle,
        accum=own_copy(inner.momentums[place].value).handle,
        lr=rate,
        grad=gradient,
        momentum=keras.ops.cast(inner.momentum, own.dtype.name),
        use_nesterov=inner.nesterov,
    )


def own_copy(variable: Any) -> tf.Variable:
    """This replica's copy of a mirrored variable.

    It relies on `_get_on_device_or_primary` of a distributed variable; another
    variable, which has no such method, is its own copy.
    """
    get = getattr(variable, "_get_on_device_or_primary", None)
    return variable if get is None else get()
