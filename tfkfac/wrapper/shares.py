"""Weights of the replicas' batches in a mean over all examples."""

import tensorflow as tf

from tfkfac.capture.loss_batch import LossBatch
from tfkfac.distributed.collectives import Communicator


def batch_share(
    batch: LossBatch, group: Communicator, replicas: int
) -> tf.Tensor | None:
    """Weight of this replica in the mean over a group.

    Args:
        batch: Its batch.
        group: The replicas that the mean is over.
        replicas: Number of all replicas, which Keras has divided the loss by.

    Returns:
        Its share of the examples of the group, times `replicas`; None if that
        is 1 or the number of examples is not known.
    """
    if group.size == 1 or batch.examples is None:
        scale = replicas / group.size
        return None if scale == 1 else tf.constant(scale, tf.float64)
    own = tf.cast(batch.examples, tf.float64)
    (total,) = group.all_reduce([own])
    return tf.math.divide_no_nan(own * replicas, total)


def weighted(tensor: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """A mean over a batch, weighted; one over no example may be NaN."""
    if share is None:
        return tensor
    return tf.math.multiply_no_nan(tensor, tf.cast(share, tensor.dtype))
