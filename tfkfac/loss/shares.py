"""Weight of each replica in the loss (share of the terms), and loss scale."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.distributed.collectives import Communicator
from tfkfac.loss.terms import LossTerms


class LossMeasure(NamedTuple):
    """Number of terms, unit and replica weights of the loss of a step."""

    # Number of terms of this replica; None for the leading dimension of each
    # layer's input.
    terms: tf.Tensor | None
    # Factor from a recorded gradient to the gradient of the negative
    # log-likelihood of one term. If `terms` is None, the caller also multiplies
    # by the number of terms.
    row_scale: tf.Tensor
    # Divisor from the gradient of the loss to the gradient of the mean negative
    # log-likelihood.
    unit: tf.Tensor
    summed: tf.Tensor  # scalar bool, True if the loss is the sum over its terms
    # Number of terms of all replicas; None if `terms` is None.
    total: tf.Tensor | None
    # Weight of this replica's gradient, (terms of this replica / terms of all)
    # times the number of replicas; None for 1.
    share: tf.Tensor | None = None
    shares: tuple[tf.Tensor, ...] = ()  # the share for each loss; empty for 1
    # Weight of the Fisher matrix of a term of each loss; empty for one loss.
    # The weighted sum is `total` times the Fisher matrix of the loss / `unit`.
    weights: tuple[tf.Tensor, ...] = ()
    losses: tuple[LossTerms, ...] = ()  # the terms of each loss
    units: tuple[tf.Tensor, ...] = ()  # unit u of the terms of each loss


def measure_loss(
    terms: tuple[LossTerms, ...],
    group: Communicator,
    replicas: int,
    is_weighed: bool,
) -> LossMeasure:
    """Find the number of terms and the unit of the loss of a group of replicas.

    Keras divides a mean by the number of replicas, although replicas may have
    different numbers of terms. It does not divide a sum. With several losses,
    the number of terms and the unit are taken from the loss with the largest
    unit, which contributes most to the curvature.

    `is_weighed` is True if the loss is multiplied by its share before its
    gradient is computed; `replicas` is the number of all replicas.
    """
    if not terms:
        unit = tf.constant(1, tf.float64)
        scale = replicas / group.size
        share = None if scale == 1 else scale * unit
        return LossMeasure(
            None,
            replicas * unit,
            unit,
            tf.constant(False),
            None,
            share,
            () if share is None else (share,),
        )
    # Use one all-reduce for the numbers of all losses.
    numbers: list[dict[str, tf.Tensor]] = []
    for loss in terms:
        row = {"count": loss.count}
        if loss.squares is not None:
            row["squares"] = loss.squares
        if not loss.is_fixed:
            row["unit"] = loss.count * loss.unit
        numbers.append(row)
    flat = iter(group.all_reduce([x for row in numbers for x in row.values()]))
    sums = [{name: next(flat) for name in row} for row in numbers]
    measures, units = zip(
        *(
            _measure_single(loss, row, replicas, is_weighed)
            for loss, row in zip(terms, sums, strict=True)
        ),
        strict=True,
    )
    main = measures[0]
    if len(terms) > 1:
        largest = tf.argmax(tf.stack(units))
        fields = zip(*(x[:6] for x in measures), strict=True)
        main = LossMeasure(*(tf.stack(values)[largest] for values in fields))
        weights = (
            tf.math.divide_no_nan(x.unit * main.total, main.unit * x.total)
            for x in measures
        )
        main = main._replace(weights=tuple(weights))
    main = main._replace(losses=terms, units=units)
    if replicas == group.size == 1:
        return main._replace(share=None)
    shares = [x.share for x in measures if x.share is not None]
    return main._replace(shares=tuple(shares))


def _measure_single(
    loss: LossTerms, sums: dict[str, tf.Tensor], replicas: int, is_weighed: bool
) -> tuple[LossMeasure, tf.Tensor]:
    """Return the `LossMeasure` of one loss, and the unit u of its terms.

    A unit that differs between replicas is averaged, weighted by their terms.
    """
    total, unit = sums["count"], loss.unit
    if not loss.is_fixed:
        unit = tf.math.divide_no_nan(sums["unit"], total)
    local, ones = replicas * loss.count, tf.ones_like(total)
    scale = total if is_weighed else local
    share = tf.math.divide_no_nan(local, total)
    term_unit = unit
    if loss.summed:
        scale, unit, share = ones, unit * total, ones
    if loss.squares is not None:
        # Use the effective number of terms T = (sum w)^2 / sum w^2 in
        # G = T sum c c^T: then G does not change if all weights w double.
        scale *= tf.sqrt(tf.math.divide_no_nan(total, sums["squares"]))
    measure = LossMeasure(
        loss.count,
        tf.math.divide_no_nan(scale, loss.unit),
        unit,
        tf.constant(loss.summed),
        total,
        share,
    )
    return measure, term_unit


def weigh(
    loss: tf.Tensor, terms: Sequence[LossTerms], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Multiply each loss of a replica by the replica's share of the terms.

    The mean over the replicas is then the mean over all terms. `shares` is
    empty if all are 1.
    """
    if not shares:
        return loss
    first, *other_shares = shares
    weighed = weighted(loss, first)
    for x, share in zip(terms[1:], other_shares, strict=False):
        if x.weighted_value is not None:
            weighed += tf.cast(
                weighted(x.weighted_value, share - first), loss.dtype
            )
    return weighed


def weighted(tensor: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """Multiply a tensor by a share; a share of 0 gives 0, even for NaN."""
    if share is None:
        return tensor
    return tf.math.multiply_no_nan(tensor, tf.cast(share, tensor.dtype))


class LossScaling:
    """Loss scale of an optimizer's gradients under a `LossScaleOptimizer`."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Reference to the `LossScaleOptimizer`; None without loss scaling.
        self.scaler: weakref.ref[Any] | None = None
        self.is_wrapped = False

    def factor(self) -> tf.Tensor | None:
        """Return the loss scale of the current gradients, or None."""
        scaler = self.scaler() if self.scaler is not None else None
        if scaler is not None:
            return tf.convert_to_tensor(scaler.dynamic_scale)
        if self.is_wrapped:
            raise ValueError(
                f"Optimizer '{self._name}' is inside a `LossScaleOptimizer` "
                "that it does not know, so the scale of its statistics is "
                "unknown. Call `optimizer.attach(model, loss_scaler=...)` "
                "with that `LossScaleOptimizer`, or compile the model with it."
            )
        return None
