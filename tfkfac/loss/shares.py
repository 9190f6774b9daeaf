"""Weights of a replica's loss: its share in that of all, and its scale."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.distributed.collectives import Communicator
from tfkfac.loss.terms import LossTerms


class LossMeasure(NamedTuple):
    """Terms, unit and shares of the loss of a step, by all replicas.

    Attributes:
        terms: Number of terms of this replica; None is the leading dimension
            of each layer's input.
        row_scale: Factor of a recorded gradient, together with the number
            of terms where that is None, to be that of a term's own negative
            log-likelihood.
        unit: Divisor of the gradient of the whole loss, to be that of
            the mean negative log-likelihood.
        summed: Scalar bool, whether the loss is the sum over its terms.
        total: Number of terms of all replicas; None like `terms`.
        share: Weight of this replica's gradient in that of the mean over all
            terms, times the number of replicas; None is 1.
        shares: The same for each of the losses; empty if all are 1.
        weights: Factors of the Fisher matrix of a term of each loss,
            so that all add up to `total` times that of the whole loss in
            its unit; empty if there is one loss.
        losses: The terms of each loss, with verdicts.
    """

    terms: tf.Tensor | None
    row_scale: tf.Tensor
    unit: tf.Tensor
    summed: tf.Tensor
    total: tf.Tensor | None
    share: tf.Tensor | None = None
    shares: tuple[tf.Tensor, ...] = ()
    weights: tuple[tf.Tensor, ...] = ()
    losses: tuple[LossTerms, ...] = ()

    def shared(
        self, share: tf.Tensor | None, shares: tuple[tf.Tensor, ...] = ()
    ) -> "LossMeasure":
        """The same measure with other shares."""
        return self._replace(share=share, shares=shares)


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
        group: The replicas that the mean is over, of so many in all.
        replicas: The number of all.
        is_weighed: True if the loss is weighed before its gradient is taken.
    """
    one = tf.constant(1, tf.float64)
    if not terms:
        scale = replicas / group.size
        share = None if scale == 1 else scale * one
        measure = LossMeasure(
            None, replicas * one, one, tf.constant(False), None
        )
        return measure.shared(share, () if share is None else (share,))
    # What the replicas have of each loss is added up in one message.
    parts = [_parts(loss) for loss in terms]
    flat = iter(group.all_reduce([x for one in parts for x in one.values()]))
    sums = [{name: next(flat) for name in one} for one in parts]
    measures, units = zip(
        *(
            _measure_one(loss, found, replicas, is_weighed)
            for loss, found in zip(terms, sums, strict=True)
        ),
        strict=True,
    )
    main = measures[0]
    if len(terms) > 1:
        largest = tf.argmax(tf.stack(units))
        fields = zip(*(one[:6] for one in measures), strict=True)
        main = LossMeasure(*(tf.stack(values)[largest] for values in fields))
        weights = (
            tf.math.divide_no_nan(one.unit * main.total, main.unit * one.total)
            for one in measures
        )
        main = main._replace(weights=tuple(weights))
    main = main._replace(losses=tuple(one.losses[0] for one in measures))
    if replicas == group.size == 1:
        return main.shared(None)
    shares = [one.share for one in measures if one.share is not None]
    return main.shared(main.share, tuple(shares))


def _parts(loss: LossTerms) -> dict[str, tf.Tensor]:
    """Numbers of a loss that the replicas add up."""
    found = loss.recognition
    parts = {
        "count": loss.count,
        "predictions": loss.predictions,
        "squares": loss.squares,
        "unit": None if loss.is_fixed else loss.count * loss.unit,
        "recognition": None if found is None else found.sums,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _measure_one(
    own: LossTerms, sums: dict[str, tf.Tensor], replicas: int, is_weighed: bool
) -> tuple[LossMeasure, tf.Tensor]:
    """The measure of one loss, by the sums of its numbers, and its unit.

    One that depends on a replica's shapes is the mean of those of all.
    """
    total, unit = sums["count"], own.unit
    if not own.is_fixed:
        unit = tf.math.divide_no_nan(sums["unit"], total)
    spread = None
    if own.squares is not None:
        spread = tf.math.divide_no_nan(total, sums["squares"])
    if own.recognition is not None:
        verdict = own.recognition.verdict(sums["recognition"])
        unit *= verdict.unit
        count = own.count
        if own.predictions is not None:
            known = verdict.is_known
            total = tf.where(known, sums["predictions"], total)
            count = tf.where(known, own.predictions, count)
        own = dataclasses.replace(
            own, count=count, unit=own.unit * verdict.unit, verdict=verdict
        )
    ours, one = replicas * own.count, tf.ones_like(total)
    scale = total if is_weighed else ours
    share = tf.math.divide_no_nan(ours, total)
    of_term = unit
    if own.summed:
        scale, unit, share = one, unit * total, one
    if spread is not None:
        # G = T sum c c^T with the number T = (sum w)^2 / sum w^2 of terms that
        # weigh the same: it is not larger where all weights are.
        scale *= tf.sqrt(spread)
    measure = LossMeasure(
        own.count,
        tf.math.divide_no_nan(scale, own.unit),
        unit,
        tf.constant(own.summed),
        total,
        share,
        losses=(own,),
    )
    return measure, of_term


def weigh(
    loss: tf.Tensor,
    terms: Sequence[LossTerms],
    shares: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Weighs a replica's loss, so that the mean is that over all terms.

    Each of its parts has a share; there are none if all are 1.
    """
    if not shares:
        return loss
    first, *others = shares
    weighed = weighted(loss, first)
    for one, share in zip(terms[1:], others, strict=False):
        if one.part is not None:
            weighed += tf.cast(weighted(one.part, share - first), loss.dtype)
    return weighed


def weighted(tensor: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """A mean or its gradient times a share; over no example it may be NaN."""
    if share is None:
        return tensor
    return tf.math.multiply_no_nan(tensor, tf.cast(share, tensor.dtype))


class LossScaling:
    """The `LossScaleOptimizer` around an optimizer, if there is one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scaler: weakref.ref[Any] | None = None
        self.is_wrapped = False

    def know(self, scaler: Any) -> None:
        """Notes the `LossScaleOptimizer`, None if there is none."""
        self._scaler = None if scaler is None else weakref.ref(scaler)

    def factor(self) -> tf.Tensor | None:
        """Factor of the loss when the gradients were taken, or None.

        Raises:
            ValueError: If the optimizer is inside a scaler it does not know.
        """
        scaler = self._scaler() if self._scaler is not None else None
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
