"""The losses that a model's `compute_loss` works out, one by one."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from tfkfac.compat.models import compiled_loss
from tfkfac.compat.overrides import overridden


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the values of a loss became a number.

    Attributes:
        values: The loss values, one for each term, before any weight.
        weights: Sample weights, or None.
        mask: Mask of the terms, or None.
        kind: Keras' name of the reduction.
    """

    values: tf.Tensor
    weights: tf.Tensor | None
    mask: tf.Tensor | None
    kind: str | None


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A call of a loss.

    Attributes:
        loss: The loss.
        y_true: Labels.
        y_pred: Predictions.
        reduction: How its values were reduced; None if Keras did not do it.
        result: What it returned.
    """

    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any
    reduction: Reduction | None
    result: tf.Tensor


@contextlib.contextmanager
def observed_losses() -> Iterator[list[LossCall]]:
    """Notes every loss that this thread calls inside, in their order.

    This relies on a loss being called by `Loss.__call__`, and on that calling
    `reduce_weighted_values(values, sample_weight=, mask=, reduction=, dtype=)`
    through the attribute of its module. A loss that is called inside of
    another is not noted.
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
        reductions.append([])
        try:
            result = below(loss, y_true, y_pred, *args, **kwargs)
        finally:
            own = reductions.pop()
        if not reductions:
            last = own[-1] if own else None
            calls.append(LossCall(loss, y_true, y_pred, last, result))
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
    """What a loss of Keras' own passes to its function.

    It relies on the attribute `_fn_kwargs` of `LossFunctionWrapper`.
    """
    return dict(getattr(loss, "_fn_kwargs", {}))


def are_probabilities(predictions: Any) -> bool:
    """Whether predictions are probabilities whose logits Keras remembers.

    It relies on `_keras_logits`, which Keras' activations leave on their
    result; its losses then use these, whatever their `from_logits`.
    """
    return hasattr(predictions, "_keras_logits")


def loss_function(loss: keras.losses.Loss) -> Callable[..., Any] | None:
    """The function that a loss of Keras' own wraps, or None.

    It relies on the attribute `fn` of `LossFunctionWrapper`.
    """
    return getattr(loss, "fn", None)
