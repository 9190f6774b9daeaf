"""Replicas compare their losses: weights in the mean over all terms."""

import tensorflow as tf

from tfkfac.capture.loss_terms import LossMeasure, LossTerms
from tfkfac.distributed.collectives import Communicator

Tensors = tuple[tf.Tensor, ...]


def measure_loss(
    terms: tuple[LossTerms, ...],
    group: Communicator,
    replicas: int,
    is_weighed: bool,
) -> LossMeasure:
    """Measures the loss of a step among the replicas of a group.

    Keras has divided a mean by the number of replicas and not by the terms
    that each of them has. A sum is left as it is. Where there are several
    losses, number of terms and unit are those of the one with the largest
    unit, which has most of the curvature.

    Args:
        terms: The terms of this replica's losses; none if they are not known.
        group: The replicas that the mean is over.
        replicas: Number of all replicas.
        is_weighed: Whether the loss is weighed before its gradient is taken.
    """
    one = tf.constant(1, tf.float64)
    if not terms:
        scale = replicas / group.size
        share = None if scale == 1 else scale * one
        return LossMeasure(
            None,
            replicas * one,
            one,
            tf.constant(False),
            None,
            share,
            () if share is None else (share,),
        )
    counts = [loss.count for loss in terms]
    totals = [tf.reduce_sum(t) for t in group.all_reduce(counts)]
    shares, rows, units = zip(
        *(
            _measure_one(loss, total, replicas, is_weighed)
            for loss, total in zip(terms, totals, strict=True)
        ),
        strict=True,
    )
    main = tf.argmax(tf.stack([loss.unit for loss in terms]))
    alone = replicas == group.size == 1
    return LossMeasure(
        _pick(counts, main),
        _pick(rows, main),
        _pick(units, main),
        _pick([tf.constant(loss.summed) for loss in terms], main),
        _pick(totals, main),
        None if alone else _pick(shares, main),
        () if alone else shares,
    )


def _measure_one(
    loss: LossTerms, total: tf.Tensor, replicas: int, is_weighed: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Share, scale of the rows and unit of one loss."""
    unit = loss.unit
    if loss.summed:
        return tf.ones_like(unit), 1 / unit, unit * total
    own = replicas * loss.count
    share = tf.math.divide_no_nan(own, total)
    return share, (total if is_weighed else own) / unit, unit


def _pick(values: Tensors | list[tf.Tensor], index: tf.Tensor) -> tf.Tensor:
    return values[0] if len(values) == 1 else tf.stack(values)[index]


def weighted(tensor: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """A gradient of a mean, weighted; one over no example may be NaN."""
    if share is None:
        return tensor
    return tf.math.multiply_no_nan(tensor, tf.cast(share, tensor.dtype))
