"""What Keras' losses read of an output besides its values."""

from typing import Any

import tensorflow as tf
from keras.src.backend.common import masking


def logits_of(output: Any) -> tf.Tensor | None:
    """The logits that cross-entropies take in the place of probabilities.

    It relies on `_keras_logits`, which Keras' softmax and sigmoid leave on
    what they return.
    """
    return getattr(output, "_keras_logits", None)


def in_place_of(
    output: tf.Tensor, value: tf.Tensor, logits: tf.Tensor | None
) -> tf.Tensor:
    """A tensor of other values that losses take for an output.

    It relies on losses finding a mask and logits on the tensor: by
    `get_keras_mask`, and as `_keras_logits`.

    Args:
        output: The output.
        value: The values.
        logits: Their logits, if the output has any.
    """
    other = tf.identity(value)
    mask = masking.get_keras_mask(output)
    if mask is not None:
        masking.set_keras_mask(other, mask)
    if logits is not None:
        other._keras_logits = logits
    return other
