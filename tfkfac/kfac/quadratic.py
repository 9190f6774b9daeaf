"""The step that minimises a quadratic model of the loss.

Martens & Grosse (2015), sections 6.4 and 7: with the gradient W, the exact
Gauss-Newton matrix F of the batch and the damping,

`M(d) = W^T d + 1/2 d^T (F + damping I) d`

is minimised over `d = alpha Delta + mu d'`, with Delta the negative
preconditioned gradient and d' the update before. Weights without a block have
a third direction, their negative gradient, with a step size of its own: how
long it has to be beside Delta nobody knows. All is in units of the negative
log-likelihood, as the damping of the factors is.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfkfac.compat.gradients import Sum
from tfkfac.curvature.gauss_newton import (
    Direction,
    gauss_newton_form,
    inner_product,
    penalty_form,
    symmetric_products,
)
from tfkfac.distributed.collectives import Communicator, differentiable_sum
from tfkfac.kfac.precondition import Preconditioned, put_back
from tfkfac.kfac.previous import Previous
from tfkfac.kfac.sample import Sample
from tfkfac.training.step import Gradients, Step, places_of

# Directions of less curvature than this, relative to the largest, are one.
_ROUNDING = 1e-6


class QuadraticModel(NamedTuple):
    """M on the span of some directions, the same bits on every replica.

    Attributes:
        form: `d_i^T (F + damping I) d_j`, float64.
        slopes: `W^T d_i`.
    """

    form: tf.Tensor
    slopes: tf.Tensor

    def minimum(self) -> tf.Tensor:
        """The coefficients for which M is least.

        A direction that is zero, or within rounding a multiple of another,
        adds nothing.
        """
        diagonal = tf.linalg.diag_part(self.form)
        scale = tf.math.divide_no_nan(
            tf.ones_like(diagonal), tf.sqrt(tf.maximum(diagonal, 0))
        )
        values, vectors = tf.linalg.eigh(
            self.form * scale[:, None] * scale[None, :]
        )
        usable = values > _ROUNDING * tf.reduce_max(values)
        inverse = tf.where(usable, 1 / tf.where(usable, values, 1), 0)
        inside = tf.linalg.matvec(vectors, scale * self.slopes, True)
        return -scale * tf.linalg.matvec(vectors, inverse * inside)

    def reduction(self, coefficients: tf.Tensor) -> tf.Tensor:
        """`-M` of a combination of the directions."""
        curvature = tf.linalg.matvec(self.form, coefficients)
        return -tf.reduce_sum(coefficients * (self.slopes + curvature / 2))


class Proposal(NamedTuple):
    """An update that minimises the model.

    Attributes:
        places: Places of its variables among the trainable weights.
        changes: What is to be added to them, for a learning rate of 1.
        coefficients: Those of the directions, by name.
        predicted: How much less the loss will be, float64.
        is_finite: Whether the model was. If not, nothing is to be added.
    """

    places: list[int]
    changes: list[tf.Tensor]
    coefficients: dict[str, tf.Tensor]
    predicted: tf.Tensor
    is_finite: tf.Tensor


def propose(
    step: Step,
    made: Sequence[Preconditioned],
    sample: Sample,
    previous: Previous,
    damping: tf.Tensor,
) -> Proposal:
    """Returns the update that minimises the quadratic model.

    Args:
        step: The step, its gradients reduced.
        made: What is preconditioned of them.
        sample: The examples that the Gauss-Newton matrix is of.
        previous: The update before.
        damping: The damping.
    """
    weights = step.job.model.trainable_variables
    places = places_of(step, weights)
    named = search_directions(step, made, previous, places)
    norms = [tf.sqrt(inner_product(parts, parts)) for parts in named.values()]
    # Of length 1, so that half precision can hold their images.
    directions = [
        scaled(parts, tf.math.divide_no_nan(tf.ones_like(norm), norm))
        for parts, norm in zip(named.values(), norms, strict=True)
    ]
    variables = [weights[place] for place in places]
    model = quadratic_model(step, sample, variables, directions, damping)
    is_finite = tf.reduce_all(tf.math.is_finite(model.form)) & tf.reduce_all(
        tf.math.is_finite(model.slopes)
    )
    size = len(directions)
    model = QuadraticModel(
        tf.where(is_finite, model.form, tf.eye(size, dtype=tf.float64)),
        tf.where(is_finite, model.slopes, tf.zeros([size], tf.float64)),
    )
    found = model.minimum()
    rate = tf.cast(step.job.inner_optimizer.learning_rate, tf.float64)
    combined = [
        tf.add_n([part for part in parts if part is not None])
        for parts in zip(
            *(scaled(parts, found[i]) for i, parts in enumerate(directions)),
            strict=True,
        )
    ]
    sizes = tf.math.divide_no_nan(found, tf.stack(norms))
    return Proposal(
        places,
        combined,
        dict(zip(named, tf.unstack(sizes), strict=True)),
        step.loss.unit * model.reduction(rate * found),
        is_finite,
    )


def search_directions(
    step: Step,
    made: Sequence[Preconditioned],
    previous: Previous,
    places: Sequence[int],
) -> dict[str, Direction]:
    """The directions, by the names of their coefficients."""
    nowhere: Gradients = [None] * len(step.gradients)
    minus = -tf.ones([], tf.float64)
    preconditioned = put_back(made, minus, nowhere)
    inverse = tf.math.divide_no_nan(minus, step.loss.unit)
    present = [i for i, g in enumerate(step.gradients) if g is not None]
    plain = [
        tf.convert_to_tensor(step.gradients[i])
        if preconditioned[i] is None
        else None
        for i in present
    ]
    found = {
        "alpha": [preconditioned[i] for i in present],
        "alpha_plain": scaled(plain, inverse),
        "mu": [tf.convert_to_tensor(previous.changes[i]) for i in places],
    }
    return {
        name: parts
        for name, parts in found.items()
        if any(part is not None for part in parts)
    }


def scaled(parts: Direction, factor: tf.Tensor) -> list[tf.Tensor | None]:
    """A direction times a number; what is not finite times 0 is 0."""
    return [
        None
        if part is None
        else tf.math.multiply_no_nan(part, tf.cast(factor, part.dtype))
        for part in parts
    ]


def quadratic_model(
    step: Step,
    sample: Sample,
    variables: Sequence[keras.Variable],
    directions: Sequence[Direction],
    damping: tf.Tensor,
) -> QuadraticModel:
    """The model of all replicas, of which each has a part of the batch.

    What all of them know is divided among them, so that one reduction gives
    the same bits everywhere.
    """
    values = [tf.identity(v.value) for v in variables]
    group = step.group
    curvature = gauss_newton_form(
        step.job.model,
        sample.call,
        sample.arguments,
        variables,
        values,
        directions,
        total_over(group),
        sample.shares,
        sample.terms,
    )
    penalties = penalty_form(variables, values, directions)
    curvature += penalties / group.size
    lengths = symmetric_products(directions, directions)
    own = tf.math.divide_no_nan(curvature, sample.unit)
    own += tf.cast(damping, tf.float64) * lengths / group.size
    gradients = [
        tf.convert_to_tensor(g) for g in step.gradients if g is not None
    ]
    slopes = tf.stack([inner_product(gradients, d) for d in directions])
    slopes = tf.math.divide_no_nan(slopes, step.loss.unit) / group.size
    return QuadraticModel(*group.all_reduce([own, slopes]))


def total_over(group: Communicator) -> Sum:
    """The sum that layers which are synchronised over a group need."""
    if group.size == 1:
        return tf.identity
    return functools.partial(differentiable_sum, group)
