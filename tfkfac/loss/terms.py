"""Terms of a loss: their number `T` and the unit `u`.

A compiled loss is `L = (u/T) sum_t nll_t`. `nll_t` is the negative
log-likelihood of term `t`, summed over its outputs. `T` is the divisor of the
reduction: the number of examples, tokens or pixels, without masked ones. With
the reduction "sum", `L = u sum_t nll_t`.

Damping and the clip refer to the Fisher matrix of a likelihood. Keras' mean
squared error over `D` features is `2/D` times the negative log-likelihood of a
normal distribution: `u = 2/D`. Binary cross-entropy has `u = 1/D` for `D`
Bernoulli variables. After division by `u` the step is the same for a mean, a
sum and any other multiple of the likelihood.

A table contains Keras' losses; users can register their losses. Any other loss
is compared with the likelihoods once (`recognition.py`). If it is not a
multiple of a likelihood, `u = 1`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfkfac.compat.losses import (
    LossCall,
    Reduction,
    is_of_keras,
    logits_of,
    loss_arguments,
    loss_function,
    loss_weights,
)
from tfkfac.loss.recognition import (
    BERNOULLI,
    CATEGORICAL,
    LOCATION,
    LOGITS,
    NORMAL,
    POISSON,
    UNKNOWN,
    Likelihood,
    recognize,
)

T = TypeVar("T")


class Known(NamedTuple):
    """Likelihood of a known loss, and the unit u that the module defines."""

    likelihood: str | None  # None if unknown, or registered by the user
    factor: float = 1.0  # unit of the loss if it sums over a term's outputs
    # True for a mean over the D outputs of a term: the unit is `factor / D`.
    is_mean: bool = False
    least: float = 0.0  # minimum of the loss of a term


# Likelihoods of losses, keyed by the function or the class of the loss.
KNOWN_LOSSES: dict[Any, Known] = {
    keras.losses.mean_squared_error: Known(NORMAL, 2.0, True),
    keras.losses.mean_absolute_error: Known(LOCATION),
    keras.losses.huber: Known(LOCATION),
    keras.losses.log_cosh: Known(LOCATION),
    keras.losses.binary_crossentropy: Known(BERNOULLI, is_mean=True),
    keras.losses.poisson: Known(POISSON, is_mean=True),
    keras.losses.categorical_crossentropy: Known(CATEGORICAL),
    keras.losses.sparse_categorical_crossentropy: Known(CATEGORICAL),
    keras.losses.kl_divergence: Known(CATEGORICAL),
    keras.losses.cosine_similarity: Known(None, least=-1.0),
    # Cosine distances times its argument `gamma`.
    keras.losses.circle: Known(None),
    # In percent. The relative error has no unit, and no known likelihood.
    keras.losses.mean_absolute_percentage_error: Known(None, 100.0, True),
}
# Losses registered by the user, keyed like `KNOWN_LOSSES`.
REGISTERED: set[Any] = set()
# Keras' losses that need a label for each output, not a class per term.
_ELEMENTWISE = {
    keras.losses.mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.poisson,
}


def check_labels(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> None:
    """Reject integer class labels for elementwise losses.

    TensorFlow's error would name only incompatible shapes.
    """
    labels, outputs = (tuple(getattr(t, "shape", ())) for t in (y_true, y_pred))
    is_short = len(labels) == len(outputs) - 1 and outputs[-1] not in (None, 1)
    is_short = is_short and bool(labels) and labels[-1] != outputs[-1]
    if is_short and loss_function(loss) in _ELEMENTWISE:
        raise ValueError(
            f"Loss '{loss.name}' compares outputs one by one. Received: labels "
            f"of shape {labels} and outputs of shape {outputs}. Classes need "
            '"sparse_categorical_crossentropy" or `keras.utils.to_categorical`.'
        )


def look_up(table: Mapping[Any, T], loss: keras.losses.Loss) -> T | None:
    """Look up a loss by its class, else by the function that it wraps."""
    return table.get(type(loss), table.get(loss_function(loss)))


def has_free_scale(terms: "LossTerms") -> bool:
    """Return True if the variance of the labels is free in the likelihood."""
    return terms.likelihood.name in (NORMAL, LOCATION)


def needs_recognition(loss: keras.losses.Loss) -> bool:
    """Return True if the loss is compared with the likelihoods."""
    return look_up(KNOWN_LOSSES, loss) is None and not is_of_keras(loss)


def recognized(losses: Sequence["LossTerms"]) -> list[tuple[str, str | None]]:
    """Return (loss, likelihood) of each loss that was compared."""
    return [
        (terms.call.loss.name, terms.likelihood.name)
        for terms in losses
        if terms.call is not None
        and needs_recognition(terms.call.loss)
        and not {type(terms.call.loss), loss_function(terms.call.loss)}
        & REGISTERED
    ]


def find_likelihood(call: LossCall, reduction: Reduction) -> Likelihood:
    """Return the likelihood of a loss, and its unit u."""
    y_pred = call.y_pred
    if not tf.is_tensor(y_pred) or not y_pred.shape.rank:
        return UNKNOWN
    known_loss = look_up(KNOWN_LOSSES, call.loss)
    if known_loss is None:
        return UNKNOWN if is_of_keras(call.loss) else recognize(call)
    if known_loss.likelihood == LOCATION:
        return recognize(call, LOCATION)
    features = 1.0
    if known_loss.is_mean:
        features = _features(y_pred, reduction.values)
    name, arguments = known_loss.likelihood, loss_arguments(call.loss)
    if arguments.get("axis", -1) not in (-1, y_pred.shape.rank - 1):
        name = None  # only the last axis is supported
    elif arguments.get("from_logits") and logits_of(y_pred) is None:
        name = LOGITS.get(name or "", name)
    unit = arguments.get("gamma", known_loss.factor) / features
    return Likelihood(name, unit, known_loss.least)


def _features(y_pred: tf.Tensor, values: tf.Tensor) -> float | tf.Tensor:
    """Return the number of outputs over which each loss value is a mean."""
    rank = values.shape.rank
    if rank == 0:
        return 1.0  # assume that the loss averages only over the examples
    outputs, terms = y_pred.shape[1:], values.shape[1:]
    if outputs.is_fully_defined() and terms.is_fully_defined():
        return max(math.prod(outputs) / max(math.prod(terms), 1), 1.0)
    if y_pred.shape[rank:].is_fully_defined():
        return float(max(math.prod(y_pred.shape[rank:]), 1))
    sizes = [
        tf.cast(tf.reduce_prod(tf.shape(t)[1:]), tf.float64)
        for t in (y_pred, values)
    ]
    return tf.maximum(tf.math.divide_no_nan(*sizes), 1.0)


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """Terms of one loss in this replica's batch."""

    count: tf.Tensor  # `T`, scalar float64
    # `u`, scalar float64, with the absolute value of the loss weight.
    unit: tf.Tensor
    summed: bool = False  # True for the sum over the terms, False for the mean
    is_fixed: bool = True  # True if the unit depends on no replica's shapes
    # Loss times its loss weight, and its call; None if not observed.
    weighted_value: tf.Tensor | None = None
    call: LossCall | None = None
    likelihood: Likelihood = UNKNOWN
    # Sum of the squared sample weights, if `count` is the sum of the weights.
    squares: tf.Tensor | None = None


def mean_over(count: Any) -> LossTerms:
    """Create `LossTerms` for a mean of `count` terms, likelihood unknown."""
    return LossTerms(_float64(count), _float64(1))


def read_terms(
    model: keras.Model, calls: Sequence[LossCall]
) -> tuple[LossTerms, ...]:
    """Return the terms of the losses that `compute_loss` has called."""
    compiled = loss_weights(model)
    matches = [call.loss for call in calls] == [loss for loss, _ in compiled]
    weights = [w for _, w in compiled] if matches else [1.0] * len(calls)
    result = []
    for call, weight in zip(calls, weights, strict=True):
        if (reduction := call.reduction) is None:
            continue
        values = reduction.values
        is_scalar = values.shape.rank == 0
        likelihood = find_likelihood(call, reduction)
        summed = likelihood.is_sum
        if not is_scalar:
            summed = reduction.kind in ("sum", "none", None)
        # Use the absolute weight: division by a negative unit would cancel the
        # sign of a negative loss weight.
        unit = tf.abs(_float64(weight)) * _float64(likelihood.unit)
        count, squares = _count(call, reduction, likelihood)
        if is_scalar and not summed:
            # Unlike Keras' reduction, this loss is not divided by the number
            # of replicas.
            unit *= tf.distribute.get_strategy().num_replicas_in_sync
        result.append(
            LossTerms(
                _float64(count),
                unit,
                summed,
                not (tf.is_tensor(likelihood.unit) or tf.is_tensor(weight)),
                tf.cast(call.result, values.dtype)
                * tf.cast(weight, values.dtype),
                call,
                likelihood,
                squares,
            )
        )
    return tuple(result)


def _count(
    call: LossCall, reduction: Reduction, likelihood: Likelihood
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Return the number of terms, and the sum of squared weights.

    For a mean, the number is the divisor. The second result is None unless the
    divisor is the sum of the weights.
    """
    if reduction.values.shape.rank == 0:
        if likelihood.name is None and needs_recognition(call.loss):
            return tf.shape(keras.tree.flatten(call.y_pred)[0])[0], None
        # Count the predictions, which are vectors on the last axis.
        shape = tf.shape(keras.tree.flatten(call.y_pred)[0])
        sizes = shape if shape.shape[0] == 1 else shape[:-1]
        return _float64(tf.reduce_prod(sizes)), None
    weights, mask = reduction.weights, reduction.mask
    valid = None if mask is None else _float64(mask)
    if reduction.kind == "mean_with_sample_weight" and weights is not None:
        weights = _float64(weights)
        if valid is not None:
            weights *= tf.reshape(valid, tf.shape(weights))
        return tf.reduce_sum(weights), tf.reduce_sum(tf.square(weights))
    count = _float64(tf.size(reduction.values))
    if valid is None:
        return count, None
    n_valid = tf.reduce_sum(valid)
    return tf.math.divide_no_nan(count * n_valid, _float64(tf.size(mask))), None


def _float64(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)
