"""Record the loss calls of `compute_loss`; read settings of Keras losses."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from tfkfac.compat.graphs import written_variables
from tfkfac.compat.models import compiled_loss, pass_mask
from tfkfac.compat.overrides import Below, overridden


def logits_of(output: Any) -> tf.Tensor | None:
    """Return the logits from which Keras computed probabilities, or None.

    This relies on `_keras_logits`, which Keras' softmax and sigmoid set on
    their results. Keras' losses use these logits, whatever their `from_logits`.
    """
    return getattr(output, "_keras_logits", None)


def in_place_of(
    output: tf.Tensor, value: tf.Tensor, logits: tf.Tensor | None
) -> tf.Tensor:
    """Return `value` with the mask of an output and the given logits.

    This relies on losses reading the mask by `get_keras_mask`, and the logits
    from `_keras_logits`.
    """
    replacement = tf.identity(value)
    pass_mask(output, replacement)
    if logits is not None:
        replacement._keras_logits = logits
    return replacement


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Unreduced values of a loss, and how Keras reduces them to a scalar.

    Attributes:
        values: One value per term.
        kind: Keras' name of the reduction.
    """

    values: tf.Tensor
    weights: tf.Tensor | None
    mask: tf.Tensor | None
    kind: str | None


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Predictions and logits of a loss call, watched by a gradient tape."""

    output: tf.Tensor
    logits: tf.Tensor | None
    tape: tf.GradientTape

    def slopes(
        self, values: tf.Tensor
    ) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Gradients of `sum(values)` with respect to output and logits."""
        logits = [] if self.logits is None else [self.logits]
        gradients = self.tape.gradient(values, [self.output, *logits])
        return gradients[0], gradients[1] if logits else None


@dataclasses.dataclass(frozen=True)
class LossCall:
    """Record of one call of a loss.

    Attributes:
        reduction: Reduction of the values; None if not done by Keras.
        leaves: The predictions on a tape, if requested.
        written: Handles of the variables that the call changed.
    """

    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any
    reduction: Reduction | None
    result: tf.Tensor
    leaves: Leaves | None = None
    written: Sequence[tf.Tensor] = ()


@contextlib.contextmanager
def observed_losses(
    differentiated: Callable[[keras.losses.Loss], bool] = lambda _: False,
    check: Callable[[keras.losses.Loss, Any, Any], None] = lambda *_: None,
) -> Iterator[list[LossCall]]:
    """Record the loss calls of this thread in this context, in order.

    A loss that is called by another loss is not recorded. This relies on
    `Loss.__call__` casting the predictions to the `dtype` of the loss, and
    calling `reduce_weighted_values` through the attribute of its module.

    Args:
        differentiated: Predicate of a loss. If True, the call is recorded on a
            tape, see `LossCall.leaves`.
        check: Function of a loss, its labels and its predictions, called before
            the loss.
    """
    calls: list[LossCall] = []
    reductions: list[list[Reduction]] = []  # stack, one entry per open call

    def call(
        below: Below,
        /,
        loss: keras.losses.Loss,
        y_true: Any,
        y_pred: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if reductions:
            return below(loss, y_true, y_pred, *args, **kwargs)
        check(loss, y_true, y_pred)
        reductions.append([])
        leaves, predictions = None, y_pred
        try:
            with contextlib.ExitStack() as stack:
                is_float = tf.is_tensor(y_pred) and y_pred.dtype.is_floating
                if is_float and differentiated(loss):
                    tape = tf.GradientTape(watch_accessed_variables=False)
                    stack.enter_context(tape)
                    leaves = _watched(y_pred, tf.as_dtype(loss.dtype), tape)
                    predictions = leaves.output
                written = stack.enter_context(written_variables())
                result = below(loss, y_true, predictions, *args, **kwargs)
        finally:
            recorded = reductions.pop()
        last = recorded[-1] if recorded else None
        calls.append(
            LossCall(loss, y_true, y_pred, last, result, leaves, written)
        )
        return result

    def reduce(
        below: Below,
        /,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if reductions:
            weights, mask_tensor = (
                None if x is None else tf.convert_to_tensor(x)
                for x in (sample_weight, mask)
            )
            terms = tf.convert_to_tensor(values)
            recorded = Reduction(terms, weights, mask_tensor, reduction)
            reductions[-1].append(recorded)
        return below(values, sample_weight, mask, reduction, dtype)

    with (
        overridden(keras.losses.Loss, "__call__", call),
        overridden(loss_module, "reduce_weighted_values", reduce),
    ):
        yield calls


def _watched(
    y_pred: tf.Tensor, dtype: tf.DType, tape: tf.GradientTape
) -> Leaves:
    """Watch predictions, cast to the dtype of a loss, on a tape."""
    if y_pred.dtype != dtype:
        # Cast like Keras, whose cast drops the logits.
        y_pred = in_place_of(y_pred, tf.cast(y_pred, dtype), None)
    logits = logits_of(y_pred)
    tape.watch([y_pred] if logits is None else [y_pred, logits])
    return Leaves(y_pred, logits, tape)


def loss_weights(model: keras.Model) -> list[tuple[Any, float]]:
    """Return losses and weights by `_flat_losses`; [] before the first call."""
    flat = getattr(compiled_loss(model), "_flat_losses", None) or []
    return [
        (x.loss, 1.0 if x.loss_weights is None else x.loss_weights)
        for x in flat
    ]


def loss_arguments(loss: keras.losses.Loss) -> dict[str, Any]:
    """Return the arguments of a loss's function, `_fn_kwargs`."""
    return dict(getattr(loss, "_fn_kwargs", {}))


def loss_function(loss: keras.losses.Loss) -> Callable[..., Any] | None:
    """Return the function `fn` of a `LossFunctionWrapper`, else None."""
    return getattr(loss, "fn", None)


def is_divergence(loss: keras.losses.Loss) -> bool:
    """Return True for the Kullback-Leibler divergence."""
    return loss_function(loss) is keras.losses.kl_divergence


def is_of_keras(loss: keras.losses.Loss) -> bool:
    """True if the function or class of a loss has a module in `keras`."""
    definition = loss_function(loss) or type(loss)
    return str(getattr(definition, "__module__", "")).split(".")[0] == "keras"
