"""Micro-batches whose gradients make one step together."""

import dataclasses

import keras
import tensorflow as tf

from tfkfac.capture.walk import walk
from tfkfac.compat.graphs import Tracked, state_variable, zeros_variable
from tfkfac.compat.optimizers import variable_key
from tfkfac.loss.shares import LossMeasure, weighted
from tfkfac.saving.entries import Entry, Spread
from tfkfac.training.job import Job
from tfkfac.training.step import Step

# The part of the state that is of micro-batches.
PENDING = "pending"


class Accumulation(Tracked):
    """Adds up the gradients of one replica's micro-batches.

    The micro-batches are one batch in pieces: what they come to is the
    gradient of the mean over the terms of all of them, or of the sum if the
    loss is one.

    Args:
        steps: Number of micro-batches.
        job: The job, whose model's weights may have gradients.
    """

    def __init__(self, steps: int, job: Job) -> None:
        super().__init__(name="accumulation")
        variables = job.model.trainable_variables
        self._steps = steps
        self._names = names_of(job.model)
        self.sums = [
            zeros_variable(v.shape, v.dtype, "gradient_sum") for v in variables
        ]
        self.count = state_variable(0, "int64", "micro_batches")
        # Of terms, and of what the gradients have been multiplied by.
        self.terms = state_variable(0, "float64", "terms")
        self.weight = state_variable(0, "float64", "weight")

    def add(self, step: Step) -> None:
        """Adds a micro-batch, whose gradients have been weighed."""
        weight = self._weight(step.loss)
        sums = self._sums_of(step)
        for own, gradient in zip(sums, step.gradients, strict=True):
            if gradient is not None:
                dense = tf.cast(tf.convert_to_tensor(gradient), own.dtype)
                own.assign_add(weighted(dense, weight))
        self.terms.assign_add(self._terms(step.loss))
        self.weight.assign_add(weight)
        self.count.assign_add(1)

    def is_complete(self) -> tf.Tensor:
        """True after the last micro-batch of a step."""
        return tf.equal(self.count, self._steps)

    def merged(self, step: Step) -> Step:
        """The step of all micro-batches, in the place of the last one's."""
        one = tf.ones_like(self.weight)
        norm = tf.where(step.loss.summed, one, self.weight)
        gradients = [
            None
            if gradient is None
            else tf.math.divide_no_nan(own, tf.cast(norm, own.dtype))
            for own, gradient in zip(
                self._sums_of(step), step.gradients, strict=True
            )
        ]
        loss = step.loss
        measure = LossMeasure(
            loss.terms,
            loss.row_scale,
            self._unit(loss),
            loss.summed,
            loss.total,
        )
        batch = dataclasses.replace(step.batch, measure=measure)
        return Step(
            step.job,
            gradients,
            step.variables,
            batch,
            step.group,
            step.before,
        )

    def _sums_of(self, step: Step) -> list[tf.Variable]:
        """The sums of the variables of a step, in their order."""
        inner = step.job.inner_optimizer
        weights = step.job.model.trainable_variables
        sums = {
            variable_key(inner, v): own
            for v, own in zip(weights, self.sums, strict=True)
        }
        return [sums[variable_key(inner, v)] for v in step.variables]

    def reset(self) -> None:
        """Forgets what has been added."""
        for variable in (*self.sums, self.count, self.terms, self.weight):
            variable.assign(tf.zeros_like(variable))

    def entries(self) -> list[Entry]:
        """All variables to save."""
        named = [
            Entry(
                path,
                f"gradient_sum_{name}",
                own,
                Spread.PARTIAL,
                PENDING,
                is_finite=False,
            )
            for (path, name), own in zip(self._names, self.sums, strict=True)
        ]
        counts = {
            "micro_batches": self.count,
            "terms": self.terms,
            "weight": self.weight,
        }
        return named + [
            Entry("", name, v, part=PENDING) for name, v in counts.items()
        ]

    def _unit(self, loss: LossMeasure) -> tf.Tensor:
        """The unit of the whole; a sum's is in proportion to its terms."""
        more = tf.math.divide_no_nan(
            tf.convert_to_tensor(self.terms), self._terms(loss)
        )
        return tf.where(loss.summed, loss.unit * more, loss.unit)

    def _terms(self, loss: LossMeasure) -> tf.Tensor:
        one = tf.ones_like(loss.unit)
        return one if loss.total is None else loss.total

    def _weight(self, loss: LossMeasure) -> tf.Tensor:
        return tf.where(loss.summed, tf.ones_like(loss.unit), self._terms(loss))


def names_of(model: keras.Model) -> list[tuple[str, str]]:
    """Path of the layer of each trainable variable, and its name there."""
    names: dict[int, tuple[str, str]] = {}
    for node in walk(model):
        own = [v for v in node.layer.trainable_variables if id(v) not in names]
        for i, variable in enumerate(own):
            names[id(variable)] = node.path, f"{i}_{variable.name}"
    return [names[id(v)] for v in model.trainable_variables]
