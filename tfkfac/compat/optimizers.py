"""A Keras optimizer: its variables, its hooks, its update in one replica."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfkfac.compat.graphs import in_xla, own_copy
from tfkfac.compat.overrides import keep_on, overridden, override

if TYPE_CHECKING:

    class KerasOptimizer:
        """`keras.optimizers.Optimizer` to a type checker.

        It would take Keras' own for `Any`, with any attribute.
        """

        name: str
        built: bool

        def __init__(self, learning_rate: float, name: str) -> None: ...
        def build(self, variables: list[keras.Variable]) -> None:
            """See `keras.Optimizer.build`."""

        def save_own_variables(self, store: Any) -> None:
            """See `keras.Optimizer.save_own_variables`."""

        def apply_gradients(self, grads_and_vars: Any) -> Any:
            """See `keras.Optimizer.apply_gradients`."""

else:

    class KerasOptimizer(keras.optimizers.Optimizer):
        """Optimizer whose Python state is in checkpoints, not in SavedModels.

        A SavedModel is a graph, in which a `PythonState` cannot be written.

        This relies on TensorFlow asking `_trackable_children` of an object
        for what to save, with "savedmodel" for a SavedModel.
        """

        def _trackable_children(
            self, save_type: str = "checkpoint", **kwargs: Any
        ) -> dict[str, Any]:
            children = super()._trackable_children(save_type, **kwargs)
            if save_type != "savedmodel":
                return children
            state = tf.train.experimental.PythonState
            return {
                name: child
                for name, child in children.items()
                if not isinstance(child, state)
            }


def named_optimizer(identifier: Any) -> Any:
    """A new optimizer of a class among the custom objects, if that is its name.

    Since version 3.16 Keras itself looks among its own alone.
    """
    if not isinstance(identifier, str):
        return identifier
    kind = keras.saving.get_custom_objects().get(identifier)
    is_class = isinstance(kind, type)
    if is_class and issubclass(kind, keras.optimizers.Optimizer):
        return kind()
    return identifier


def parts_of_multi_optimizer(optimizer: Any) -> Sequence[Any] | None:
    """The optimizers in a `MultiOptimizer`, or None if it is no such thing.

    Keras has had them since version 3.15.
    """
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    is_such = kind is not None and isinstance(optimizer, kind)
    return optimizer.optimizers if is_such else None


def variable_key(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Hashable:
    """A key of a variable that is the same on all replicas.

    It relies on `_var_key`, by which an optimizer finds a variable again that
    it meets as another object: a Keras variable, the mirrored variable inside
    it, or one replica's copy of that.
    """
    return optimizer._var_key(variable)


def updates_by_step(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if `update_step` is all that an optimizer does in an update.

    Nadam has one number beside, see `updates_in_replica`. It relies on what
    others do being in a `_backend_update_step` of their own.
    """
    known = (keras.optimizers.Optimizer, keras.optimizers.Nadam)
    own = type(optimizer)._backend_update_step
    return own in [one._backend_update_step for one in known]


def knows_variable(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """True if an optimizer was built for a variable.

    It relies on the keys of `_trainable_variables_indices` being those of
    `_var_key`.
    """
    known = optimizer._trainable_variables_indices
    return variable_key(optimizer, variable) in known


def trainable_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """The variables that an optimizer was built for, in their order.

    It relies on `_trainable_variables`, which `apply` without variables uses.
    """
    return list(optimizer._trainable_variables)


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The learning rate as it is kept: a variable, schedule or callable.

    It relies on `_learning_rate`. The public one is a schedule's value.
    """
    return optimizer._learning_rate


def raw_iterations(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable that counts the calls of `apply`.

    It relies on `_iterations`. The public `iterations` is the number of
    updates, which with an accumulation of gradients is not a variable.
    """
    return optimizer._iterations


def sgd_momenta(
    optimizer: keras.optimizers.SGD, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """The momentum that SGD keeps for some variables; none without momentum.

    It relies on `momentums`, in the order of `_get_variable_index`, and on a
    step with momentum `mu` making `mu b - rate g` of each b and adding to the
    weights that, or with `nesterov` `mu b - rate g` of the new b.
    """
    momenta = optimizer.momentums
    if not momenta:
        return []
    return [momenta[optimizer._get_variable_index(v)] for v in variables]


def on_overflow(
    scaler: keras.optimizers.LossScaleOptimizer,
    prepare: Callable[[], Callable[[], None]],
) -> None:
    """Does something where a `LossScaleOptimizer` skips a step.

    `prepare` is called before each step, and returns what is to be done. A
    second time for the same optimizer changes nothing.

    It relies on `_common_apply` calling `_stateful_handle_non_finite_grads`
    in the one of two branches that skips, in a single replica.
    """

    def apply(below: Callable[..., None], *args: Any, **kwargs: Any) -> None:
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


def build_once(
    scaler: keras.optimizers.LossScaleOptimizer,
    variables: Sequence[keras.Variable],
) -> None:
    """Builds a `LossScaleOptimizer`, which is not built again after that.

    It relies on `built`, and on `build` making the scale and its counter anew
    each time: Keras calls it without asking where it loads a model.
    """

    def build(below: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not scaler.built:
            below(*args, **kwargs)

    keep_on(
        scaler, "_tfkfac_build_once", lambda: override(scaler, "build", build)
    )
    scaler.build(variables)


# TensorFlow has kernels of SGD for others too, not everywhere on GPUs.
_DTYPES = (tf.float32, tf.float64)


@contextlib.contextmanager
def updates_in_replica(
    inner: keras.optimizers.Optimizer, after: Callable[[], None] | None = None
) -> Iterator[None]:
    """Lets an optimizer update this replica's copies of the variables.

    Keras goes from the replicas to one merged context for each update, which
    is illegal inside a `tf.cond`, and reduces the gradients once more there.
    With gradients that are reduced already every replica does the same update
    on its own copies, which stay equal. Accumulation, averaging, clipping and
    weight decay then are what they are in a single process. `after` is called
    where the weights have been updated, before averages and constraints; with
    accumulation, in the steps that do an update.

    This relies on `BaseOptimizer.apply` doing what touches variables through
    these five methods, called by name on the optimizer and on its counter of
    iterations: `_backend_update_step(grads, variables, learning_rate)` once an
    update, with gradients already clipped and averaged over an accumulation,
    `_backend_increment_gradient_accumulators`, `_apply_weight_decay`,
    `_overwrite_model_variables_with_average_value` and `assign_add`. Averages
    are in `_model_variables_moving_average`, in the order of the variables,
    and `BaseOptimizer` has a weight decay of its own that stays in a replica.
    Since version 3.16 `_backend_maybe_overwrite_model_variables` asks when to
    overwrite, of which `BaseOptimizer` has one that stays there, too.
    """
    iterations = raw_iterations(inner)

    def update_step(
        _: Any, grads: Any, variables: Any, learning_rate: Any
    ) -> None:
        rate = tf.convert_to_tensor(learning_rate)  # read once
        if isinstance(inner, keras.optimizers.Nadam):
            move_product(inner)
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

    def overwrite_if_due(_: Any, variables: Sequence[keras.Variable]) -> None:
        BaseOptimizer._backend_maybe_overwrite_model_variables(inner, variables)

    def decay(_: Any, variables: Sequence[keras.Variable]) -> None:
        BaseOptimizer._apply_weight_decay(inner, variables)

    def count(_: Any, delta: Any) -> None:
        own = own_copy(iterations.value)
        own.assign_add(tf.cast(delta, own.dtype))

    asks = "_backend_maybe_overwrite_model_variables"
    with contextlib.ExitStack() as stack:
        if hasattr(inner, asks):
            stack.enter_context(overridden(inner, asks, overwrite_if_due))
        for owner, name, function in (
            (inner, "_backend_update_step", update_step),
            (inner, "_backend_increment_gradient_accumulators", accumulate),
            (inner, "_overwrite_model_variables_with_average_value", overwrite),
            (inner, "_apply_weight_decay", decay),
            (iterations, "assign_add", count),
        ):
            stack.enter_context(overridden(owner, name, function))
        yield


def apply_or_count(
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[tf.Tensor | None, keras.Variable]],
) -> None:
    """Lets an optimizer do a step, which is counted where it has no gradient.

    It relies on `apply` refusing to do a step without any.
    """
    if all(gradient is None for gradient, _ in pairs):
        raw_iterations(optimizer).assign_add(1)
        return
    gradients, variables = zip(*pairs, strict=True)
    optimizer.apply(list(map(with_rows_once, gradients)), variables)


def with_rows_once(gradient: Any) -> Any:
    """A sparse gradient in which no row is there twice.

    Keras' Adam squares slices one by one: what an embedding has looked up
    twice would have another second moment than its gradient has.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if in_xla():  # which knows no numbers of rows
        return tf.convert_to_tensor(gradient)
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, places, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def move_product(nadam: keras.optimizers.Nadam) -> None:
    """Does what Nadam does once in an update, before its `update_step`s.

    It relies on that being a factor for `_u_product`, the product of its
    momenta so far (Dozat, 2016).
    """
    own = own_copy(nadam._u_product.value)
    step = tf.cast(nadam.iterations, own.dtype) + 1
    own.assign(own * nadam.beta_1 * (1 - 0.5 * tf.pow(0.96, step)))


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
    (momentum,) = sgd_momenta(inner, [variable])
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=own.handle,
        accum=own_copy(momentum.value).handle,
        lr=rate,
        grad=gradient,
        momentum=keras.ops.cast(inner.momentum, own.dtype.name),
        use_nesterov=inner.nesterov,
    )
