"""How far a model is off, beside one that knows nothing of the labels."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.loss_terms import LossTerms
from tfkfac.compat.losses import loss_function

_CATEGORICAL = (
    keras.losses.categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
)


def surprise(terms: LossTerms) -> tf.Tensor:
    """The sum over the terms of their loss, each over that of a guess.

    It is 0 for a loss that has no bound where nothing is known, as a squared
    error has none.

    Args:
        terms: The terms of a loss.

    Returns:
        A scalar float64, a constant for all tapes: replicas add it up under
        one, and collectives have no gradient.
    """
    call = terms.call
    if call is None:
        return tf.zeros([], tf.float64)
    loss = tf.stop_gradient(tf.cast(call.result, tf.float64))
    total = tf.reduce_sum(loss)
    if not terms.summed:
        if call.reduction is not None and call.reduction.values.shape.rank:
            # Keras has divided its mean by the number of replicas.
            total *= tf.distribute.get_strategy().num_replicas_in_sync
        # The mean over no term may be NaN.
        total = tf.math.multiply_no_nan(total, terms.count)
    return total / _guess(call.loss, call.y_pred)


def _guess(loss: keras.losses.Loss, y_pred: Any) -> float | tf.Tensor:
    """The loss of a term whose outputs are all held to be equally likely."""
    function = loss_function(loss)
    if function is keras.losses.binary_crossentropy:
        return math.log(2)
    if function not in _CATEGORICAL or not tf.is_tensor(y_pred):
        return math.inf
    classes = tf.shape(y_pred)[-1] if y_pred.shape.rank else 0
    return tf.math.log(tf.cast(tf.maximum(classes, 2), tf.float64))
