"""The losses that a model's `compute_loss` works out, and their outputs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from tfkfac.compat.graphs import written_variables
from tfkfac.compat.models import compiled_loss, pass_mask
from tfkfac.compat.overrides import overridden


def logits_of(output: Any) -> tf.Tensor | None:
    """The logits that cross-entropies take in the place of probabilities.

    It relies on `_keras_logits`, which Keras' softmax and sigmoid leave on
    what they return; its losses then use these, whatever their `from_logits`.
    """
    return getattr(output, "_keras_logits", None)


def in_place_of(
    output: tf.Tensor, value: tf.Tensor, logits: tf.Tensor | None
) -> tf.Tensor:
    """A tensor of other values and logits that losses take for an output.

    It relies on losses finding a mask and logits on the tensor: by
    `get_keras_mask`, and as `_keras_logits`.
    """
    other = tf.identity(value)
    pass_mask(output, other)
    if logits is not None:
        other._keras_logits = logits
    return other


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Values of a loss, one for each term, and their reduction to a number.

    The weights and the mask of the terms come after the values. `kind` is
    Keras' name of the reduction.
    """

    values: tf.Tensor
    weights: tf.Tensor | None
    mask: tf.Tensor | None
    kind: str | None


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Predictions, in the dtype of a loss, that it has read on a tape.

    With them are the logits behind them, if Keras remembers any.
    """

    output: tf.Tensor
    logits: tf.Tensor | None
    tape: tf.GradientTape

    def slopes(
        self, values: tf.Tensor
    ) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Gradients of the sum of the values at the output and the logits."""
        there = [] if self.logits is None else [self.logits]
        found = self.tape.gradient(values, [self.output, *there])
        return found[0], found[1] if there else None


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A call of a loss, and what it returned.

    Attributes:
        reduction: How its values were reduced; None if Keras did not do it.
        leaves: Its predictions on a tape, if that was asked for.
        written: Handles of the variables that it has changed.
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
    """Notes every loss that this thread calls inside, in their order.

    This relies on a loss being called by `Loss.__call__`, on that casting the
    predictions to the `dtype` of the loss, and calling
    `reduce_weighted_values(values, sample_weight=, mask=, reduction=, dtype=)`
    through the attribute of its module. A loss that is called inside of
    another is not noted. Each that is `differentiated` is recorded on a tape
    of its own, from which its gradient at the predictions can be had. A check
    of the loss, its labels and predictions comes before it.
    """
    calls: list[LossCall] = []
    reductions: list[list[Reduction]] = []  # of the calls that are going on

    def call(
        below: Callable[..., Any],
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
        leaves, read = None, y_pred
        try:
            with contextlib.ExitStack() as stack:
                floats = tf.is_tensor(y_pred) and y_pred.dtype.is_floating
                if floats and differentiated(loss):
                    tape = tf.GradientTape(watch_accessed_variables=False)
                    stack.enter_context(tape)
                    leaves = _watched(y_pred, tf.as_dtype(loss.dtype), tape)
                    read = leaves.output
                written = stack.enter_context(written_variables())
                result = below(loss, y_true, read, *args, **kwargs)
        finally:
            own = reductions.pop()
        last = own[-1] if own else None
        calls.append(
            LossCall(loss, y_true, y_pred, last, result, leaves, written)
        )
        return result

    def reduce(
        below: Callable[..., Any],
        /,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if reductions:
            weights, where = (
                None if x is None else tf.convert_to_tensor(x)
                for x in (sample_weight, mask)
            )
            terms = tf.convert_to_tensor(values)
            seen = Reduction(terms, weights, where, reduction)
            reductions[-1].append(seen)
        return below(values, sample_weight, mask, reduction, dtype)

    with (
        overridden(keras.losses.Loss, "__call__", call),
        overridden(loss_module, "reduce_weighted_values", reduce),
    ):
        yield calls


def _watched(
    y_pred: tf.Tensor, dtype: tf.DType, tape: tf.GradientTape
) -> Leaves:
    """The predictions as a loss takes them, watched by a tape."""
    if y_pred.dtype != dtype:
        # Keras casts them, which leaves the logits behind.
        y_pred = in_place_of(y_pred, tf.cast(y_pred, dtype), None)
    logits = logits_of(y_pred)
    tape.watch([y_pred] if logits is None else [y_pred, logits])
    return Leaves(y_pred, logits, tape)


def loss_weights(model: keras.Model) -> list[tuple[Any, float]]:
    """The compiled losses of a model and their weights, as they are called.

    It relies on `_flat_losses` of the compiled loss, which is there once it
    has been called, with the attributes `loss` and `loss_weights`.
    """
    flat = getattr(compiled_loss(model), "_flat_losses", None) or []
    return [
        (x.loss, 1.0 if x.loss_weights is None else x.loss_weights)
        for x in flat
    ]


def loss_arguments(loss: keras.losses.Loss) -> dict[str, Any]:
    """Arguments that a loss of Keras' own passes to its function.

    It relies on the attribute `_fn_kwargs` of `LossFunctionWrapper`.
    """
    return dict(getattr(loss, "_fn_kwargs", {}))


def loss_function(loss: keras.losses.Loss) -> Callable[..., Any] | None:
    """The function that a loss of Keras' own wraps, or None.

    It relies on the attribute `fn` of `LossFunctionWrapper`.
    """
    return getattr(loss, "fn", None)


def is_of_keras(loss: keras.losses.Loss) -> bool:
    """True if a loss is one of Keras' own, and not a user's function or class.

    It relies on the modules of Keras' functions and classes being in `keras`.
    """
    own = loss_function(loss) or type(loss)
    return str(getattr(own, "__module__", "")).split(".")[0] == "keras"
