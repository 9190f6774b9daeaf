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
    """Unreduced values of a loss, and how Keras reduces them to a scalar."""

    values: tf.Tensor  # one value per term
    weights: tf.Tensor | None
    mask: tf.Tensor | None
    kind: str | None  # Keras' name of the reduction

    def term_weights(self) -> tf.Tensor | None:
        """Return sample weights times mask, shaped as `values`; None for 1.

        A loss that returns a scalar is multiplied by the mean of the weights.
        """
        if not self.values.shape.rank and self.weights is not None:
            return tf.reduce_mean(tf.cast(self.weights, tf.float32))
        return self.product(self.weights, self.mask)

    def product(self, *factors: tf.Tensor | None) -> tf.Tensor | None:
        """Multiply factors in the shape of `values`; None is 1."""
        present = [x for x in factors if x is not None]
        rank, shape = self.values.shape.rank, tf.shape(self.values)
        if not rank or not present:
            return None
        product = tf.ones(shape, tf.float32)
        for weights in present:
            if weights.shape.rank == rank + 1:  # with a last axis of size 1
                weights = tf.squeeze(weights, -1)
            while weights.shape.rank < rank:  # as Keras does
                weights = tf.expand_dims(weights, -1)
            product *= tf.cast(weights, product.dtype)
        return product


@dataclasses.dataclass(frozen=True)
class LossCall:
    """Record of one call of a loss."""

    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any
    reduction: Reduction | None  # None if Keras does not reduce the values
    result: tf.Tensor
    written: Sequence[tf.Tensor] = ()  # handles of variables the loss changed


@contextlib.contextmanager
def observed_losses(
    check: Callable[[keras.losses.Loss, Any, Any], None] = lambda *_: None,
) -> Iterator[list[LossCall]]:
    """Record the loss calls of this thread in this context, in order.

    A loss that is called by another loss is not recorded. This relies on
    `Loss.__call__` calling `reduce_weighted_values` through the attribute of
    its module.

    Args:
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
        try:
            with written_variables() as written:
                result = below(loss, y_true, y_pred, *args, **kwargs)
        finally:
            recorded = reductions.pop()
        last = recorded[-1] if recorded else None
        calls.append(LossCall(loss, y_true, y_pred, last, result, written))
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


def loss_weights(model: keras.Model) -> list[tuple[Any, float]]:
    """Return losses and weights by `_flat_losses`; [] before the first call."""
    return [
        (x.loss, 1.0 if x.loss_weights is None else x.loss_weights)
        for x in getattr(compiled_loss(model), "_flat_losses", None) or []
    ]


def loss_arguments(loss: keras.losses.Loss) -> dict[str, Any]:
    """Return the arguments of a loss's function, `_fn_kwargs`."""
    return dict(getattr(loss, "_fn_kwargs", {}))


def loss_function(loss: keras.losses.Loss) -> Callable[..., Any] | None:
    """Return the function `fn` of a `LossFunctionWrapper`, else None."""
    return getattr(loss, "fn", None)


def is_of_keras(loss: keras.losses.Loss) -> bool:
    """True if the function or class of a loss has a module in `keras`."""
    definition = loss_function(loss) or type(loss)
    return str(getattr(definition, "__module__", "")).split(".")[0] == "keras"
