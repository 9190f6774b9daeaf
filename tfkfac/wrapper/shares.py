"""Replicas compare their losses: weights in the mean over all terms."""

import tensorflow as tf

from tfkfac.capture.loss_terms import LossMeasure, LossTerms
from tfkfac.capture.surprise import surprise
from tfkfac.distributed.collectives import Communicator

# So many times the loss of a guess is ordinary at the start of training.
_ORDINARY = 10


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
    totals, units, surprises = _totals(terms, group)
    dispersions = tuple(dispersion(mean) for mean in surprises)
    measures = [
        _measure_one(loss, total, unit, replicas, is_weighed).tempered(times)
        for loss, total, unit, times in zip(
            terms, totals, units, dispersions, strict=True
        )
    ]
    main = measures[0]
    if len(terms) > 1:
        largest = tf.argmax(tf.stack(units))
        fields = zip(*(one[:6] for one in measures), strict=True)
        main = LossMeasure(*(tf.stack(values)[largest] for values in fields))
        main = LossMeasure(*main[:6], weights=_weights(measures, main))
    main = main._replace(dispersions=dispersions)
    if replicas == group.size == 1:
        return main.shared(None)
    shares = [one.share for one in measures if one.share is not None]
    return main.shared(main.share, tuple(shares))


def dispersion(mean: tf.Tensor) -> tf.Tensor:
    """How many times too large a model's outputs are, at least 1.

    Logits that are far too large, as on inputs that are not normalised, make
    a loss of many times that of a guess, and in proportion to their size. The
    empirical Fisher matrix then lets a step lower it by a fraction of a nat.
    With outputs divided by their dispersion, predictions and curvature are
    those of a model on normalised inputs.

    Args:
        mean: The mean loss of a term over that of a guess. Up to 10 is a
            model at its start, whose loss stays as it is.
    """
    excess = tf.maximum(mean / _ORDINARY, 1)
    return tf.where(tf.math.is_finite(excess), excess, tf.ones_like(excess))


def _totals(
    terms: tuple[LossTerms, ...], group: Communicator
) -> tuple[list[tf.Tensor], ...]:
    """Number of terms, unit and mean surprise of each loss.

    They are the same on all replicas. A unit that depends on a replica's
    shapes becomes their mean.
    """
    number = len(terms)
    counts = [loss.count for loss in terms]
    surprises = [surprise(loss) for loss in terms]
    open_ = [loss.count * loss.unit for loss in terms if not loss.is_fixed]
    sums = group.all_reduce([*counts, *surprises, *open_])
    totals, rest = sums[:number], iter(sums[2 * number :])
    units = [
        loss.unit if loss.is_fixed else tf.math.divide_no_nan(next(rest), total)
        for loss, total in zip(terms, totals, strict=True)
    ]
    means = [
        tf.math.divide_no_nan(sum_, total)
        for sum_, total in zip(sums[number : 2 * number], totals, strict=True)
    ]
    return totals, units, means


def _measure_one(
    loss: LossTerms,
    total: tf.Tensor,
    unit: tf.Tensor,
    replicas: int,
    is_weighed: bool,
) -> LossMeasure:
    """The measure of one loss, of which all replicas have total and unit."""
    own, one = replicas * loss.count, tf.ones_like(total)
    scale = total if is_weighed else own
    share = tf.math.divide_no_nan(own, total)
    if loss.summed:
        scale, unit, share = one, unit * total, one
    return LossMeasure(
        loss.count,
        tf.math.divide_no_nan(scale, loss.unit),
        unit,
        tf.constant(loss.summed),
        total,
        share,
    )


def _weights(
    measures: list[LossMeasure], main: LossMeasure
) -> tuple[tf.Tensor, ...]:
    """Weights of the losses' Fisher matrices, see `LossMeasure`."""
    return tuple(
        tf.math.divide_no_nan(one.unit * main.total, main.unit * one.total)
        for one in measures
    )


def weighted(tensor: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """A gradient of a mean, weighted; one over no example may be NaN."""
    if share is None:
        return tensor
    return tf.math.multiply_no_nan(tensor, tf.cast(share, tensor.dtype))
