"""Minimum of a loss for given targets, and number of labels per term.

The negative log-likelihood of soft or binary targets y is at least their
entropy, `-sum y log y`, for any outputs. Training cannot reduce this part of
the loss.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.losses import LossCall, loss_arguments, loss_function
from tfkfac.loss.recognition import (
    BERNOULLI,
    BERNOULLI_LOGITS,
    CATEGORICAL,
    CATEGORICAL_LOGITS,
    CROSS_ENTROPIES,
    POISSON,
)
from tfkfac.loss.terms import LossTerms

_OF_CLASSES = (CATEGORICAL, CATEGORICAL_LOGITS)
_OF_BITS = (BERNOULLI, BERNOULLI_LOGITS)


def least_loss(losses: Sequence[LossTerms], replicas: int) -> tf.Tensor:
    """Return the minimum of a replica's loss over the model's outputs.

    The minimum is the entropy of the targets of a cross-entropy, or a constant
    of the loss. Like Keras, divide a mean by the number of replicas.
    """
    minima = [tf.zeros([], tf.float64)]
    for terms in losses:
        minimum = terms.unit * _minimum(terms)
        divisor = tf.ones_like(terms.count)
        if not terms.summed:
            divisor = terms.count * replicas
        minima.append(tf.math.divide_no_nan(minimum, divisor))
    return tf.add_n(minima)


def label_count(losses: Sequence[LossTerms]) -> tf.Tensor:
    """Return the number of independent labels of a term, summed over losses.

    A term has one label for each output, or a single class.
    """
    total = tf.zeros([], tf.float64)
    for terms in losses:
        call, name = terms.call, terms.likelihood.name
        if call is None:
            continue
        sizes: Any = 1
        if name is not None and name not in _OF_CLASSES:
            assert call.reduction is not None
            axes = call.reduction.values.shape.rank
            axes = axes or max(call.y_pred.shape.rank - 1, 1)
            sizes = tf.reduce_prod(tf.shape(call.y_pred)[axes:])
        total += tf.cast(sizes, tf.float64)
    return tf.maximum(total, 1.0)


def _minimum(terms: LossTerms) -> tf.Tensor:
    """Return the weighted sum of the minima of all terms, divided by u."""
    total = tf.zeros([], tf.float64)
    if terms.call is None or terms.call.reduction is None:
        return total
    values = terms.call.reduction.values
    weights = terms.call.reduction.term_weights()
    entropies = _entropies(terms.call, terms.likelihood.name)
    if entropies is not None:
        if (rank := values.shape.rank) and entropies.shape.rank > rank:
            axes = list(range(rank, entropies.shape.rank))
            entropies = tf.reduce_sum(entropies, axes)
        if weights is not None:
            weights = tf.cast(weights, entropies.dtype)
            entropies = tf.math.multiply_no_nan(entropies, weights)
        total += tf.cast(tf.reduce_sum(entropies), tf.float64)
    constant = terms.likelihood.constant
    if tf.is_tensor(constant) or constant != 0:
        count = terms.count
        if weights is not None:
            sum_ = tf.cast(tf.reduce_sum(weights), tf.float64)
            count = sum_ if values.shape.rank else count * sum_
        total += constant / terms.likelihood.unit * count
    return total


def _entropies(call: LossCall, likelihood: str | None) -> tf.Tensor | None:
    """Return the least losses of the targets; None for minima of 0."""
    y = call.y_true
    is_known = likelihood in (*CROSS_ENTROPIES, POISSON)
    is_known &= isinstance(y, (tf.Tensor, tf.Variable, np.ndarray))
    # The minimum of a divergence is 0: the divergence of y from itself.
    is_divergence = loss_function(call.loss) is keras.losses.kl_divergence
    if not is_known or is_divergence:
        return None
    y = tf.convert_to_tensor(y)
    # Use float32: label smoothing needs it for integers, sums for float16.
    if not y.dtype.is_floating or y.dtype.size < 4:
        y = tf.cast(y, tf.float32)
    if likelihood == POISSON:
        return y - _xlogx(y)  # `p - y log p` is minimal at `p = y`
    smoothing = tf.cast(
        loss_arguments(call.loss).get("label_smoothing", 0.0), y.dtype
    )
    if likelihood in _OF_BITS:
        y = y * (1 - smoothing) + smoothing / 2
        return -_xlogx(y) - _xlogx(1 - y)
    if y.shape.rank != call.y_pred.shape.rank:
        return None  # classes
    y = y * (1 - smoothing)
    y += smoothing / tf.cast(tf.shape(y)[-1], y.dtype)
    # `-sum y log p` is minimal at `p = y / sum y`.
    total = tf.reduce_sum(y, -1, keepdims=True)
    return tf.math.xlogy(y, total) - _xlogx(y)


def _xlogx(x: tf.Tensor) -> tf.Tensor:
    x = tf.maximum(x, 0)  # avoid NaN for invalid (negative) targets
    return tf.math.xlogy(x, x)
