"""The clip in the metric of the Fisher matrix."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.linalg.tensors import stack_scalars


class Clip(NamedTuple):
    """What the clip does in one step.

    Attributes:
        factor: What the preconditioned gradients are multiplied by.
        length: The squared length of the step before.
    """

    factor: tf.Tensor
    length: tf.Tensor


def clip_step(
    products: Sequence[tf.Tensor],
    kl_clip: tf.Tensor | None,
    learning_rate: Any,
) -> Clip:
    """`nu = min(1, sqrt(kl_clip / (lr^2 |sum <P, W>|)))`.

    `lr^2 <P, W>` is the squared length of a step in the Fisher metric, about
    twice the change of the model's predictions in nats (Distributed K-FAC,
    eq. 16). All preconditioned gradients are scaled by the same factor.

    Args:
        products: `<P, W>` of each block, of its gradient `W` and the
            preconditioned one.
        kl_clip: Largest squared length; None is none.
        learning_rate: Learning rate of the inner optimizer.

    Returns:
        Factor and length, scalars of float64; 1 if there is nothing to clip.
    """
    total = tf.abs(tf.reduce_sum(stack_scalars(products)))
    length = tf.square(tf.cast(learning_rate, tf.float64)) * total
    if kl_clip is None:
        return Clip(tf.ones_like(length), length)
    clipped = tf.sqrt(
        tf.math.divide_no_nan(tf.cast(kl_clip, tf.float64), length)
    )
    factor = tf.where(length > 0, tf.minimum(clipped, 1.0), 1.0)
    return Clip(factor, length)
