"""Gradient accumulation over the micro-batches of a step."""

import dataclasses

import tensorflow as tf

from tfkfac.capture.walk import walk
from tfkfac.compat.optimizers import variable_key
from tfkfac.loss.shares import LossMeasure, weighted
from tfkfac.saving.entries import Spread
from tfkfac.saving.slots import Slots
from tfkfac.training.job import Job
from tfkfac.training.step import Step

# Section of a saved file that holds the sums over micro-batches.
PENDING = "pending"


class Accumulation(Slots):
    """Sums of the gradients of one replica's micro-batches.

    The result equals the gradient of one large batch: of the mean over all
    terms, or of the sum for a summed loss.
    """

    def __init__(self, job: Job) -> None:
        super().__init__("accumulation", section=PENDING)
        # Name each weight by its layer, and by a number and name in the layer.
        names: dict[int, tuple[str, str]] = {}
        for node in walk(job.model):
            weights = node.layer.trainable_variables
            unnamed = [v for v in weights if id(v) not in names]
            for i, weight in enumerate(unnamed):
                names[id(weight)] = node.path, f"{i}_{weight.name}"
        sums = []
        for weight in job.model.trainable_variables:
            path, name = names[id(weight)]
            sums.append(
                self.slot(
                    f"gradient_sum_{name}",
                    weight.shape,
                    weight.dtype,
                    layer=path,
                    spread=Spread.PARTIAL,
                    is_finite=False,
                )
            )
        self.sums = sums
        self.count = self.slot("micro_batches")
        # Sums over micro-batches: numbers of loss terms, and weights.
        self.terms = self.slot("terms", dtype="float64")
        self.weight = self.slot("weight", dtype="float64")
        self.loss, self.excess = (
            self.slot(
                name, dtype="float64", spread=Spread.PARTIAL, is_finite=False
            )
            for name in ("loss", "excess")
        )

    def add(self, step: Step) -> None:
        """Add a micro-batch, after `Step.weigh`."""
        terms = _num_terms(step.loss)
        weight = tf.where(step.loss.summed, tf.ones_like(terms), terms)
        sums = self._sums_of(step)
        for sum_, gradient in zip(sums, step.gradients, strict=True):
            if gradient is not None:
                dense = tf.cast(tf.convert_to_tensor(gradient), sum_.dtype)
                sum_.assign_add(weighted(dense, weight))
        self.loss.assign_add(weighted(step.weighted_loss(), weight))
        self.excess.assign_add(weighted(step.weighted_excess(), weight))
        self.terms.assign_add(terms)
        self.weight.assign_add(weight)
        self.count.assign_add(1)

    def merged(self, step: Step) -> Step:
        """Return the last micro-batch's step with the mean gradients of all."""
        loss = step.loss
        weight = tf.where(loss.summed, tf.ones_like(self.weight), self.weight)
        gradients = [
            None
            if gradient is None
            else tf.math.divide_no_nan(sum_, tf.cast(weight, sum_.dtype))
            for sum_, gradient in zip(
                self._sums_of(step), step.gradients, strict=True
            )
        ]
        # The unit of a summed loss is proportional to the number of terms.
        ratio = tf.math.divide_no_nan(
            tf.convert_to_tensor(self.terms), _num_terms(loss)
        )
        unit = tf.where(loss.summed, loss.unit * ratio, loss.unit)
        measure = LossMeasure(
            loss.terms, loss.row_scale, unit, loss.summed, loss.total
        )
        loss_value, excess = None, None
        if step.batch.value is not None:
            loss_value, excess = (
                tf.math.divide_no_nan(tf.convert_to_tensor(sum_), weight)
                for sum_ in (self.loss, self.excess)
            )
        batch = dataclasses.replace(
            step.batch, measure=measure, value=loss_value, excess=excess
        )
        return dataclasses.replace(step, gradients=gradients, batch=batch)

    def _sums_of(self, step: Step) -> list[tf.Variable]:
        """Return the gradient sums in the order of the variables of a step."""
        inner = step.job.inner_optimizer
        weights = step.job.model.trainable_variables
        sums = {
            variable_key(inner, v): sum_
            for v, sum_ in zip(weights, self.sums, strict=True)
        }
        return [sums[variable_key(inner, v)] for v in step.variables]


def _num_terms(loss: LossMeasure) -> tf.Tensor:
    return tf.ones_like(loss.unit) if loss.total is None else loss.total
