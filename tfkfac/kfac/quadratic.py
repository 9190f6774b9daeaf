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

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.statistics import Examples, Subsample, choose_subsample
from tfkfac.capture.model_taps import ForwardCall, ForwardTap
from tfkfac.compat.graphs import Sum, exact_second_derivatives
from tfkfac.curvature.gauss_newton import (
    Direction,
    gauss_newton_form,
    inner_product,
    penalty_form,
    symmetric_products,
)
from tfkfac.distributed.collectives import Communicator, differentiable_sum
from tfkfac.kfac.bank import State
from tfkfac.kfac.natural import Natural, Preconditioned, Seen, put_back
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.settings import LevenbergMarquardt, QuadraticStep
from tfkfac.linalg.tensors import select
from tfkfac.loss.batch import find_call, replay_loss
from tfkfac.loss.terms import LossTerms
from tfkfac.saving.slots import Slots
from tfkfac.training.accumulation import names_of
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job
from tfkfac.training.step import Gradients, Step, places_of

# Directions of less curvature than this, relative to the largest, are one.
_PARALLEL = 1e-6
# The reduction ratios between which the damping stays.
_LOW, _HIGH = 1 / 4, 3 / 4
# A step that is rejected quarters the radius of a trust region, which damping
# is the inverse of.
_REJECTED = 4.0
# A step that predicts over 4x the last verified reduction is verified too.
_UNUSUAL = 4.0
# Rounding errors of a loss, relative to it.
_ROUNDING = 1e-6
# Names of these sections in a saved file.
ADAPTIVE = "adaptive_damping"
PREVIOUS = "previous"


class Quadratic(Natural):
    """Steps that minimise a quadratic model of the loss."""

    title = ", steps by the quadratic model"
    rule: QuadraticStep

    @override
    def sample(self, step: Step) -> Any:
        return Sample.of(step)

    @override
    def damping(self, state: State, clock: tf.Tensor) -> tf.Tensor:
        adaptive = state.find(AdaptiveDamping)
        if adaptive is None:
            return super().damping(state, clock)
        return tf.convert_to_tensor(adaptive.value)

    @override
    def takes_rows(self, workers: int) -> bool:
        return False

    @override
    def wants_renewal(self, state: State) -> tf.Tensor | None:
        adaptive = state.find(AdaptiveDamping)
        # If it has just grown.
        return None if adaptive is None else adaptive.again > 0

    @override
    def gradients(
        self,
        made: Sequence[Preconditioned],
        step: Step,
        state: State,
        seen: Seen,
    ) -> Gradients:
        fraction = self.rule.batch_fraction
        return quadratic_step(
            step, made, seen.sample, fraction, state, seen.damping
        )

    @override
    def attach(self, model: keras.Model) -> None:
        ForwardTap.open(model)

    @override
    def sections(self, job: Job) -> Sequence[Slots]:
        damping = self._damping.get()
        if isinstance(damping, LevenbergMarquardt):
            return Previous(job.model), AdaptiveDamping(damping)
        return (Previous(job.model),)

    @override
    def bytes(
        self, placement: Placement, rank: int, gradients: int
    ) -> dict[str, int]:
        return {"previous_update": gradients}

    @override
    def events(self, state: State) -> list[tuple[str, tf.Variable]]:
        adaptive = state.find(AdaptiveDamping)
        return [("steps rejected", adaptive.rejected)] if adaptive else []

    @override
    def left_title(self, optimizer: str) -> str:
        return "Moved along their gradients, by a step size of their own:"

    @override
    def lines(self, state: State) -> list[str]:
        adaptive = state.find(AdaptiveDamping)
        return [adaptive.text()] if adaptive else []


class AdaptiveDamping(Slots):
    """The damping of one replica, the same on all.

    Attributes:
        value: The damping, float64.
        rejected: Number of steps rejected.
        again: 1 after a step that was rejected, else 0.
        trusted: The reduction predicted of the last accepted step that was
            looked at, float64; infinite before the first.
    """

    def __init__(self, rule: LevenbergMarquardt) -> None:
        super().__init__("damping", part=ADAPTIVE)
        self.rule = rule
        self.value = self.slot("damping", (), "float64", rule.initial)
        self.rejected = self.slot("rejected_steps")
        self.again = self.slot("looks_again")
        self.trusted = self.slot(
            "trusted_reduction", (), "float64", math.inf, is_finite=False
        )

    def is_due(self, clock: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        """True if the update after `clock` others is to be verified."""
        last = tf.equal((clock + 1) % self.rule.every, 0)
        unusual = predicted > _UNUSUAL * self.trusted
        return last | unusual | (self.again > 0)

    def judge(
        self,
        before: tf.Tensor,
        after: tf.Tensor,
        predicted: tf.Tensor,
        name: str,
    ) -> tf.Tensor:
        """Adapts the damping to a step; returns a bool, true if it is accepted.

        The loss before and after it, and the reduction predicted, are float64.
        """
        rounding = _ROUNDING * tf.abs(before)
        # None is predicted of a learning rate of 2 or more.
        expected = tf.maximum(predicted, 0)
        ratio = (before - after + rounding) / (expected + rounding)
        accepted = ratio >= 0  # not if it is NaN
        step = tf.constant(self.rule.decay**self.rule.every, tf.float64)
        one = tf.ones_like(step)
        factor = tf.where(ratio > _HIGH, step, one)
        factor = tf.where(ratio < _LOW, 1 / step, factor)
        factor = tf.where(accepted, factor, _REJECTED)
        self.value.assign(
            tf.clip_by_value(
                self.value * factor, self.rule.minimum, self.rule.maximum
            )
        )
        self.again.assign(tf.cast(~accepted, tf.int64))
        self.trusted.assign(tf.where(accepted, expected, self.trusted))
        count_each(
            ~accepted,
            self.rejected,
            [name],
            "a step is rejected, it would raise the loss; the damping grows.",
        )
        return accepted

    def text(self) -> str:
        """A line of the summary."""
        return f"Damping now {float(self.value.numpy()):.4g}, {self.rule!r}."


class Previous(Slots):
    """The update before, of one replica.

    Attributes:
        changes: What was added to each trainable weight.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__("previous", part=PREVIOUS)
        self.changes = [
            self.slot(f"previous_update_{name}", v.shape, v.dtype, layer=path)
            for v, (path, name) in zip(
                model.trainable_variables, names_of(model), strict=True
            )
        ]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Inputs of the loss of a batch, or of some of its examples."""

    call: ForwardCall
    arguments: dict[str, Any]
    """Those of `compute_loss`, without the predictions."""
    shares: Sequence[tf.Tensor]
    """This replica's weights of the losses in the mean."""
    terms: Sequence[LossTerms]
    """The terms of the losses, of the whole batch."""
    unit: tf.Tensor
    """Factor of the loss over a negative log-likelihood."""

    @classmethod
    def of(cls, step: Step) -> "Sample":
        """Takes the batch of a step, whose loss the replicas have compared.

        Raises:
            ValueError: If the loss was not computed by `compute_loss`.
        """
        model = step.job.model
        call = find_call(model, step.batch, ForwardTap.open(model).take())
        arguments = dict(step.batch.arguments)
        del arguments["y_pred"]
        return cls(
            dataclasses.replace(call, outputs=None),
            arguments,
            step.loss.shares,
            step.batch.terms,
            step.loss.unit,
        )

    def part(self, part: Subsample | None, model: str) -> "Sample":
        """Takes some of the examples, all if `part` is None.

        Raises:
            ValueError: If the batch cannot be divided; it names the model.
        """
        if part is None:
            return self
        batch = (self.call.args, self.call.kwargs, self.arguments)
        leaves = [x for x in keras.tree.flatten(batch) if is_batch(x)]
        for leaf in leaves:
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                raise ValueError(
                    "Argument `batch_fraction` of `QuadraticStep` must be 1.0 "
                    "where inputs are sparse or ragged, as those of model "
                    f"'{model}': {leaf}. "
                    f"Received: batch_fraction={part.fraction}"
                )
        examples = Examples(tf.shape(leaves[0])[0], part)

        def take(leaf: Any) -> Any:
            whole = not is_batch(leaf) or leaf.shape[0] != leaves[0].shape[0]
            return leaf if whole else examples.of(leaf)

        args, kwargs, arguments = keras.tree.map_structure(take, batch)
        call = ForwardCall(args, kwargs, None)
        return dataclasses.replace(self, call=call, arguments=arguments)


def is_batch(leaf: Any) -> bool:
    """True if a part of a batch has examples."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return tf.is_tensor(leaf) and leaf.shape.rank != 0


class Proposal(NamedTuple):
    """An update that minimises the model."""

    places: list[int]
    """Places of its variables among the trainable weights."""
    changes: list[tf.Tensor]
    """What is to be added to them, for a learning rate of 1."""
    coefficients: dict[str, tf.Tensor]
    """Those of the directions, by name."""
    predicted: tf.Tensor
    """How much less the loss will be, float64."""
    is_finite: tf.Tensor
    """False if the model was not. Nothing is to be added then."""


def quadratic_step(
    step: Step,
    made: Sequence[Preconditioned],
    sample: Sample,
    fraction: float | None,
    state: State,
    damping: tf.Tensor,
) -> Gradients:
    """The step that minimises the quadratic model, if it holds what it says.

    Its Gauss-Newton matrix is of a fraction of the sample.

    Returns:
        The gradients for an inner optimizer that is plain SGD.
    """
    job, previous = step.job, state.section(Previous)
    part = choose_subsample(fraction, job.clock, step.group.size)
    proposal = propose(
        step, made, sample.part(part, job.model.name), previous, damping
    )
    count_each(
        ~proposal.is_finite,
        state.report.lost,
        [job.name],
        "the quadratic model of a step is not finite, the weights stay.",
    )
    accepted, actual = tf.constant(True), tf.constant(float("nan"), tf.float64)
    adaptive = state.find(AdaptiveDamping)
    if adaptive is not None:
        accepted, actual = look(step, sample, proposal, adaptive)
    changes = [select(accepted, d, tf.zeros_like(d)) for d in proposal.changes]
    for place, change in zip(proposal.places, changes, strict=True):
        own = previous.changes[place]
        own.assign(select(accepted & proposal.is_finite, change, own))
    state.report.assign(
        **proposal.coefficients,
        predicted_reduction=proposal.predicted,
        actual_reduction=actual,
        damping=damping,
    )
    rest = iter(changes)
    return [None if g is None else -next(rest) for g in step.gradients]


def look(
    step: Step, sample: Sample, proposal: Proposal, damping: AdaptiveDamping
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the loss at the new weights if that is due.

    Returns:
        True if the step is accepted, and how much smaller it makes the loss,
        NaN if nobody has looked.
    """
    job = step.job
    weights = job.model.trainable_variables
    variables = [weights[place] for place in proposal.places]
    values = [tf.identity(v.value) for v in variables]
    rate = job.inner_optimizer.learning_rate
    moved = [
        value + tf.cast(rate, value.dtype) * change
        for value, change in zip(values, proposal.changes, strict=True)
    ]

    def compare() -> tuple[tf.Tensor, tf.Tensor]:
        # Both anew, so that they see the same dropout masks. Keras does not
        # reduce the loss of an empty batch.
        with exact_second_derivatives(total_over(step.group)):
            losses = [
                replay_loss(
                    job.model,
                    sample.call,
                    sample.arguments,
                    variables,
                    point,
                    sample.shares,
                )
                for point in (values, moved)
            ]
        before, after = step.group.all_reduce(
            [tf.cast(tf.reduce_sum(x), tf.float64) for x in losses]
        )
        accepted = damping.judge(before, after, proposal.predicted, job.name)
        return accepted, before - after

    def pass_by() -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(True), tf.constant(float("nan"), tf.float64)

    due = damping.is_due(job.clock, proposal.predicted)
    due &= proposal.is_finite
    return tf.cond(due, compare, pass_by)


def propose(
    step: Step,
    made: Sequence[Preconditioned],
    sample: Sample,
    previous: Previous,
    damping: tf.Tensor,
) -> Proposal:
    """Returns the update that minimises the quadratic model."""
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


class QuadraticModel(NamedTuple):
    """M on the span of some directions, the same bits on every replica."""

    form: tf.Tensor
    """`d_i^T (F + damping I) d_j`, float64."""
    slopes: tf.Tensor
    """`W^T d_i`."""

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
        usable = values > _PARALLEL * tf.reduce_max(values)
        inverse = tf.where(usable, 1 / tf.where(usable, values, 1), 0)
        inside = tf.linalg.matvec(vectors, scale * self.slopes, True)
        return -scale * tf.linalg.matvec(vectors, inverse * inside)

    def reduction(self, coefficients: tf.Tensor) -> tf.Tensor:
        """`-M` of a combination of the directions."""
        curvature = tf.linalg.matvec(self.form, coefficients)
        return -tf.reduce_sum(coefficients * (self.slopes + curvature / 2))


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
