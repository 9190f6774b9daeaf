"""How far a model is off, beside one that knows nothing of the labels."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.losses import LossCall, loss_function

_CATEGORICAL = (
    keras.losses.categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
)


def surprise(call: LossCall, count: tf.Tensor | None) -> tf.Tensor:
    """The sum over the terms of their loss, each over that of a guess.

    It is 0 for a loss that has no bound where nothing is known, as a squared
    error has none.

    Args:
        call: The call of the loss.
        count: Number of its terms; None if it is their sum.

    Returns:
        A scalar float64.
    """
    # Replicas compare it under the tape.
    result = tf.stop_gradient(call.result)
    total = tf.reduce_sum(tf.cast(result, tf.float64))
    if count is not None:
        if call.reduction is not None and call.reduction.values.shape.rank:
            # Keras has divided its mean by the number of replicas.
            total *= tf.distribute.get_strategy().num_replicas_in_sync
        # The mean over no term may be NaN.
        total = tf.math.multiply_no_nan(total, count)
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
