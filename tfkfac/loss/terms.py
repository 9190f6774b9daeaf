"""Terms of a loss, their number and its unit.

A compiled loss is `L = u (1/T) sum_t nll_t`, with `T` what its reduction
divides by (examples, tokens, pixels; the valid ones where there is a mask) and
`nll_t` the negative log-likelihood of a term, summed over its outputs. One
whose reduction is "sum" is `T` times that.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.losses import LossCall, Reduction, loss_weights
from tfkfac.loss.recognition import Recognition, Verdict
from tfkfac.loss.units import is_open, is_sum, natural_unit


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """The terms of one loss, of this replica's batch.

    Attributes:
        count: `T`, a scalar float64: what the mean is over.
        unit: `u`, a scalar float64, the size of the loss' weight included;
            without what a `recognition` will add to it.
        summed: True if the loss is the sum over the terms, not the mean.
        is_fixed: True if the unit is the same on all replicas, a number that
            no shape of theirs has a say in.
        part: Its part of the whole loss; None if there is nothing else.
        call: The call of the loss; None if nobody has seen it.
        likelihood: Name of its likelihood, if that is known before.
        recognition: The batch's word on unit and likelihood, if that
            decides.
        verdict: That of the batches of all replicas, once they have met.
        predictions: `T` where the loss is a likelihood; None is `count`.
        squares: The sum of the squares of the weights of the terms, where
            `count` is the sum of the weights; None if all weigh the same.
    """

    count: tf.Tensor
    unit: tf.Tensor
    summed: bool = False
    is_fixed: bool = True
    part: tf.Tensor | None = None
    call: LossCall | None = None
    likelihood: str | None = None
    recognition: Recognition | None = None
    verdict: Verdict | None = None
    predictions: tf.Tensor | None = None
    squares: tf.Tensor | None = None


def mean_over(count: Any) -> LossTerms:
    """A loss that is the mean over some terms, of no known likelihood."""
    return LossTerms(_wide(count), _wide(1))


def read_terms(
    model: keras.Model, calls: Sequence[LossCall]
) -> tuple[LossTerms, ...]:
    """Returns the terms of the losses that a `compute_loss` has called.

    Args:
        model: The model.
        calls: The calls of losses in it.
    """
    compiled = loss_weights(model)
    ours = [call.loss for call in calls] == [loss for loss, _ in compiled]
    weights = [w for _, w in compiled] if ours else [1.0] * len(calls)
    return tuple(
        _terms_of(call, call.reduction, weight)
        for call, weight in zip(calls, weights, strict=True)
        if call.reduction is not None
    )


def _terms_of(
    call: LossCall, reduction: Reduction, weight: float | tf.Tensor
) -> LossTerms:
    values = reduction.values
    unit = natural_unit(call)
    # A negative weight is the user's own; it does not turn the step around.
    scale = tf.abs(_wide(weight)) * _wide(unit.value)
    part = tf.cast(call.result, values.dtype) * tf.cast(weight, values.dtype)
    is_fixed = not (tf.is_tensor(unit.value) or tf.is_tensor(weight))
    terms = LossTerms(
        _wide(1),
        scale,
        False,
        is_fixed,
        part,
        call,
        unit.likelihood,
        unit.recognition,
    )
    if values.shape.rank:
        count, squares = _count(reduction)
        return dataclasses.replace(
            terms,
            count=count,
            summed=reduction.kind in ("sum", "none", None),
            squares=squares,
        )
    return _single(terms, call)


def _single(terms: LossTerms, call: LossCall) -> LossTerms:
    """The terms of a loss that returns one number.

    The user's own reduction, which Keras leaves as it is: it does not divide
    by the number of replicas either.
    """
    count = predictions = _predictions(call.y_pred)
    summed, unit, recognition = False, terms.unit, terms.recognition
    if is_open(call.loss):
        count = _wide(tf.shape(keras.tree.flatten(call.y_pred)[0])[0])
        summed = is_sum(call)
    if not summed:
        unit *= tf.distribute.get_strategy().num_replicas_in_sync
        if recognition is not None:
            recognition = recognition.times(predictions)
    return dataclasses.replace(
        terms,
        count=count,
        unit=unit,
        summed=summed,
        recognition=recognition,
        predictions=predictions,
    )


def _count(reduction: Reduction) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Divisor of Keras, if it took a mean.

    And the sum of squares of weights, if it is the sum of these.
    """
    values, weights, mask = (
        reduction.values,
        reduction.weights,
        reduction.mask,
    )
    valid = None if mask is None else _wide(mask)
    if reduction.kind == "mean_with_sample_weight" and weights is not None:
        own = _wide(weights)
        if valid is not None:
            own *= tf.reshape(valid, tf.shape(own))
        return tf.reduce_sum(own), tf.reduce_sum(tf.square(own))
    count = _wide(tf.size(values))
    if valid is None:
        return count, None
    valid_ones = tf.reduce_sum(valid)
    return tf.math.divide_no_nan(count * valid_ones, _wide(tf.size(mask))), None


def _predictions(y_pred: Any) -> tf.Tensor:
    """Number of predictions, each a vector of features."""
    first = keras.tree.flatten(y_pred)[0]
    shape = tf.shape(first)
    if first.shape.rank == 1:
        return _wide(shape[0])
    return _wide(tf.reduce_prod(shape[:-1]))


def _wide(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)
