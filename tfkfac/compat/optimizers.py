"""Keras optimizers: variables, hooks, and updates inside a replica."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfkfac.compat.graphs import in_xla, replica_copy
from tfkfac.compat.overrides import Below, keep_on, overridden, override


class KerasOptimizer(keras.optimizers.Optimizer):
    """Optimizer whose Python state is in checkpoints, not in SavedModels.

    A SavedModel is a graph, in which a `PythonState` cannot be written.

    This relies on TensorFlow asking `_trackable_children` of an object for what
    to save, with "savedmodel" for a SavedModel.
    """

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            return dict(children)
        state = tf.train.experimental.PythonState
        return {k: v for k, v in children.items() if not isinstance(v, state)}


def named_optimizer(identifier: Any) -> Any:
    """Create an optimizer from a custom name; return other identifiers."""
    if isinstance(identifier, str):
        # Keras accepts only the names of its own optimizers from 3.16 on.
        custom = keras.saving.get_custom_objects().get(identifier)
        base = keras.optimizers.Optimizer
        if isinstance(custom, type) and issubclass(custom, base):
            return custom()
    return identifier


def variable_key(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Hashable:
    """Return `_var_key` of a variable, equal for all copies on replicas."""
    return optimizer._var_key(variable)


def is_decayed(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Return `_use_weight_decay`, which is False for excluded variables."""
    return bool(optimizer._use_weight_decay(variable))


def exclude_from_decay(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Exclude variables from weight decay, before any variable is decayed.

    `exclude_from_weight_decay` would replace the variables that the user has
    excluded. This relies on `_exclude_from_weight_decay`, a set of keys.
    """
    excluded = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
    excluded |= {variable_key(optimizer, v) for v in variables}
    optimizer._exclude_from_weight_decay = excluded


def updates_by_step(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if an optimizer's update consists of its `update_step` calls.

    Nadam also qualifies, because `updates_in_replica` handles its momentum
    product. This relies on all other optimizers with additional work overriding
    `_backend_update_step`.
    """
    classes = (keras.optimizers.Optimizer, keras.optimizers.Nadam)
    method = type(optimizer)._backend_update_step
    return method in [c._backend_update_step for c in classes]


def knows_variable(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """True if `_trainable_variables_indices` of an optimizer has a variable."""
    keys = optimizer._trainable_variables_indices
    return variable_key(optimizer, variable) in keys


def trainable_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Return `_trainable_variables`, for which an optimizer was built."""
    return list(optimizer._trainable_variables)


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return `_learning_rate`; the property would evaluate a schedule."""
    return optimizer._learning_rate


def raw_iterations(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return `_iterations`, the variable that counts the calls of `apply`.

    The public property `iterations` counts updates; with gradient accumulation
    it is not a variable.
    """
    return optimizer._iterations


def sgd_momenta(
    optimizer: keras.optimizers.SGD, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Return SGD's momentum buffers `b` of some variables; [] without momentum.

    This relies on `momentums`, indexed by `_get_variable_index`, and on SGD's
    update with momentum `mu` and gradient `g`: `b = mu b - rate g`, then
    `w += b`, or `w += mu b - rate g` with `nesterov`.
    """
    momenta = optimizer.momentums
    if not momenta:
        return []
    return [momenta[optimizer._get_variable_index(v)] for v in variables]


def on_overflow(
    scaler: keras.optimizers.LossScaleOptimizer,
    prepare: Callable[[], Callable[[], None]],
) -> None:
    """Call a function in each step that a `LossScaleOptimizer` skips.

    `prepare` is called before each step and returns this function. Repeated
    calls for the same scaler have no effect.

    This relies on `_common_apply` calling `_stateful_handle_non_finite_grads`
    only in the branch of skipped steps, in a single replica.
    """

    def apply(below: Below, *args: Any, **kwargs: Any) -> None:
        undo = prepare()

        def skip(handle: Callable[[], None]) -> None:
            undo()
            handle()

        with overridden(scaler, "_stateful_handle_non_finite_grads", skip):
            below(*args, **kwargs)

    keep_on(
        scaler,
        "_tfkfac_on_overflow",
        lambda: override(scaler, "_common_apply", apply),
    )


@contextlib.contextmanager
def updates_in_replica(
    inner: keras.optimizers.Optimizer, after: Callable[[], None] | None = None
) -> Iterator[None]:
    """Make an optimizer update this replica's copies of the variables.

    By default Keras enters a merge call for each update, which is illegal
    inside a `tf.cond`, and reduces the gradients again. Here the gradients are
    already reduced, so all replicas compute the same update of their copies.

    This relies on `BaseOptimizer.apply` changing variables only through
    `iterations.assign_add` and these methods of the optimizer:

    - `_backend_update_step(grads, variables, learning_rate)`, once per update,
      with clipped gradients, averaged over an accumulation
    - `_backend_increment_gradient_accumulators`
    - `_apply_weight_decay`; `BaseOptimizer` has a version for one replica
    - `_overwrite_model_variables_with_average_value`, with the averages in
      `_model_variables_moving_average`, in the order of the variables
    - since Keras 3.16 `_backend_maybe_overwrite_model_variables`, which decides
      when to overwrite; `BaseOptimizer` has a version for one replica
    - `_u_product` of Nadam, the product of its momenta, and no other work of
      Nadam per update

    `after` is called after the weights are updated, before averages and
    constraints. With accumulation, only in steps with an update.
    """
    iterations = raw_iterations(inner)

    def update_step(
        _: Any, grads: Any, variables: Any, learning_rate: Any
    ) -> None:
        rate = tf.convert_to_tensor(learning_rate)  # read the variable once
        if isinstance(inner, keras.optimizers.Nadam):
            # Update Nadam's product of momenta, once per update (Dozat, 2016).
            # In step t the factor is `beta_1 (1 - 0.96^t / 2)`.
            product = replica_copy(inner._u_product.value)
            t = tf.cast(inner.iterations, product.dtype) + 1
            factor = 1 - 0.5 * tf.pow(0.96, t)
            product.assign(product * inner.beta_1 * factor)
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

    def count(_: Any, delta: Any) -> None:
        replica_value = replica_copy(iterations.value)
        replica_value.assign_add(tf.cast(delta, replica_value.dtype))

    with contextlib.ExitStack() as stack:
        for name in (
            "_apply_weight_decay",
            "_backend_maybe_overwrite_model_variables",
        ):
            if base := getattr(BaseOptimizer, name, None):
                stack.enter_context(
                    overridden(
                        inner, name, lambda _, v, base=base: base(inner, v)
                    )
                )
        for owner, name, function in (
            (inner, "_backend_update_step", update_step),
            (inner, "_backend_increment_gradient_accumulators", accumulate),
            (inner, "_overwrite_model_variables_with_average_value", overwrite),
            (iterations, "assign_add", count),
        ):
            stack.enter_context(overridden(owner, name, function))
        yield


def merge_rows(gradient: Any) -> Any:
    """Sum duplicate rows of a sparse gradient.

    Keras' Adam squares each slice separately: the second moment of a row with
    several slices would differ from the square of its gradient.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if in_xla():  # XLA cannot compile a dynamic number of rows
        return tf.convert_to_tensor(gradient)
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, positions, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def update_variable(
    inner: keras.optimizers.Optimizer,
    gradient: tf.Tensor | tf.IndexedSlices,
    variable: keras.Variable,
    learning_rate: tf.Tensor,
) -> None:
    """Run an optimizer's `update_step` on this replica's copy of a variable.

    Keras' SGD passes over the variable four times. TensorFlow's fused kernel
    makes one pass and computes the same bits.
    """
    copy = replica_copy(variable.value)
    # TensorFlow has kernels for these dtypes on CPUs and on all GPUs.
    has_kernel = copy.dtype in (tf.float32, tf.float64)
    is_sgd = type(inner) is keras.optimizers.SGD and has_kernel
    if not is_sgd or not isinstance(gradient, tf.Tensor):
        inner.update_step(gradient, variable, learning_rate)
        return
    gradient = tf.cast(gradient, copy.dtype)
    rate = tf.cast(learning_rate, copy.dtype)
    if inner.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=copy.handle, alpha=rate, delta=gradient
        )
        return
    (momentum,) = sgd_momenta(inner, [variable])
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=copy.handle,
        accum=replica_copy(momentum.value).handle,
        lr=rate,
        grad=gradient,
        momentum=keras.ops.cast(inner.momentum, copy.dtype.name),
        use_nesterov=inner.nesterov,
    )
