"""Minimum of a loss for given targets, and number of labels per term.

The negative log-likelihood of soft or binary targets y is at least their
entropy, `-sum y log y`, for any outputs. Training cannot reduce this part of
the loss.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.compat.losses import LossCall, is_divergence, loss_arguments
from tfkfac.loss.recognition import (
    BERNOULLI,
    BERNOULLI_LOGITS,
    CATEGORICAL,
    CATEGORICAL_LOGITS,
)
from tfkfac.loss.terms import LossTerms

_OF_CLASSES = (CATEGORICAL, CATEGORICAL_LOGITS)
_OF_BITS = (BERNOULLI, BERNOULLI_LOGITS)


def least_loss(losses: Sequence[LossTerms], replicas: int) -> tf.Tensor:
    """Minimum of a replica's loss over all outputs, scaled as the loss.

    It is 0 for losses that are not cross-entropies. Keras divides a mean by
    the number of replicas.
    """
    minima = [tf.zeros([], tf.float64)]
    for terms in losses:
        entropy = _by_likelihood(terms, _entropy)
        divisor = tf.ones_like(terms.count)
        if not terms.summed:
            divisor = terms.count * replicas
        minima.append(tf.math.divide_no_nan(terms.unit * entropy, divisor))
    return tf.add_n(minima)


def label_count(losses: Sequence[LossTerms]) -> tf.Tensor:
    """Return the number of independent labels of a term, summed over losses.

    A term has one label for each output, or a single class.
    """
    counts = [_by_likelihood(terms, _labels) for terms in losses]
    return tf.maximum(tf.add_n([tf.zeros([], tf.float64), *counts]), 1.0)


def _by_likelihood(terms: LossTerms, function: Any) -> tf.Tensor:
    """Return `function(call, likelihood)` for the likelihood of a loss."""
    call, verdict = terms.call, terms.verdict
    if call is None or call.reduction is None:
        return tf.zeros([], tf.float64)
    if verdict is None:
        return function(call, terms.likelihood)
    # Call the function once per name: candidates may share a likelihood.
    values = {
        name: function(call, name) for name in dict.fromkeys(verdict.names)
    }
    results = [*(values[name] for name in verdict.names), function(call, None)]
    return tf.gather(tf.stack(results), verdict.index)


def _labels(call: LossCall, likelihood: str | None) -> tf.Tensor:
    """Return the number of labels of a term."""
    assert call.reduction is not None
    if likelihood is None or likelihood in _OF_CLASSES:
        return tf.ones([], tf.float64)
    axes = call.reduction.values.shape.rank or call.y_pred.shape.rank - 1
    sizes = tf.shape(call.y_pred)[axes:]
    return tf.cast(tf.reduce_prod(sizes), tf.float64)


def _entropy(call: LossCall, likelihood: str | None) -> tf.Tensor:
    """Return the weighted sum of the entropies of the targets of all terms."""
    y = call.y_true
    is_known = likelihood in (*_OF_CLASSES, *_OF_BITS)
    is_known &= isinstance(y, (tf.Tensor, tf.Variable, np.ndarray))
    # The minimum of a divergence is 0: the divergence of y from itself.
    if not is_known or is_divergence(call.loss):
        return tf.zeros([], tf.float64)
    y = tf.convert_to_tensor(y)
    # Use float32: label smoothing needs it for integers, sums for float16.
    if not y.dtype.is_floating or y.dtype.size < 4:
        y = tf.cast(y, tf.float32)
    smoothing = tf.cast(
        loss_arguments(call.loss).get("label_smoothing", 0.0), y.dtype
    )
    if likelihood in _OF_BITS:
        y = y * (1 - smoothing) + smoothing / 2
        entropies = _xlogx(y) + _xlogx(1 - y)
    elif y.shape.rank != call.y_pred.shape.rank:
        return tf.zeros([], tf.float64)  # classes: the minimum is 0
    else:
        y = y * (1 - smoothing)
        y += smoothing / tf.cast(tf.shape(y)[-1], y.dtype)
        # `-sum y log p` is minimal at `p = y / sum y`.
        total = tf.reduce_sum(y, -1, keepdims=True)
        entropies = _xlogx(y) - tf.math.xlogy(y, total)
    return _weighted_sum(-entropies, call)


def _weighted_sum(entropies: tf.Tensor, call: LossCall) -> tf.Tensor:
    """Sum the entropies over the terms, with the loss's weights and mask."""
    reduction = call.reduction
    assert reduction is not None
    rank = reduction.values.shape.rank
    if rank:
        axes = list(range(rank, entropies.shape.rank))
        entropies = tf.reduce_sum(entropies, axes)
        for weights in (reduction.weights, reduction.mask):
            if weights is not None:
                weights = tf.cast(weights, entropies.dtype)
                if weights.shape.rank == rank + 1:
                    weights = tf.squeeze(weights, -1)
                elif weights.shape.rank == rank - 1:
                    weights = tf.expand_dims(weights, -1)  # as Keras does
                entropies = tf.math.multiply_no_nan(entropies, weights)
    return tf.cast(tf.reduce_sum(entropies), tf.float64)


def _xlogx(x: tf.Tensor) -> tf.Tensor:
    x = tf.maximum(x, 0)  # avoid NaN for invalid (negative) targets
    return tf.math.xlogy(x, x)
