"""FOSI's update of the weights: Newton steps along V plus the inner steps."""

import dataclasses
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfkfac.compat.functions import when
from tfkfac.compat.graphs import replica_copy
from tfkfac.compat.optimizers import sgd_momenta
from tfkfac.curvature.hessian import flat_space
from tfkfac.distributed.collectives import Communicator
from tfkfac.fosi.layouts import SubspaceStep, zero_unless_finite
from tfkfac.fosi.subspace import NewtonRate, State
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job
from tfkfac.training.step import Gradients, Step, Update, indices_in


def is_plain_sgd(job: Job) -> bool:
    """Return True for SGD whose weight change is linear in the gradients."""
    inner, weights = job.inner_optimizer, job.model.trainable_variables
    nonlinear_options = (
        inner.weight_decay,
        inner.clipnorm,
        inner.clipvalue,
        inner.global_clipnorm,
        inner.gradient_accumulation_steps,
    )
    return (
        type(inner) is keras.optimizers.SGD
        and not any(nonlinear_options)
        # Exclude weights of a lower precision than the directions.
        and {tf.as_dtype(v.dtype) for v in weights}
        == {flat_space(weights).dtype}
    )


def has_momentum(job: Job) -> bool:
    """Return True if the inner optimizer is plain SGD with momentum."""
    return is_plain_sgd(job) and job.inner_optimizer.momentum > 0


def flat_momentum(job: Job, length: int) -> tf.Tensor | None:
    """Return plain SGD's momentum as a vector padded to `length`, or None."""
    if not has_momentum(job):
        return None
    weights = job.model.trainable_variables
    momenta = sgd_momenta(job.inner_optimizer, weights)
    return flat_space(weights).join([b.value for b in momenta], length)


def adopt(
    state: State,
    ritz_values: tf.Tensor,
    directions: tf.Tensor,
    group: Communicator,
    job: Job,
) -> None:
    """Replace the local block of V^T by an estimate, if finite and nonzero."""
    # `ritz_values` is bitwise equal on all replicas: all take the same branch.
    finite = tf.reduce_all(tf.math.is_finite(ritz_values))
    count_each(
        tf.logical_not(finite),
        state.failures,
        [job.name],
        "an estimation of curvature is not finite and ignored.",
    )
    # An empty batch has zero curvature: keep the directions of earlier batches.
    usable = finite & tf.reduce_any(ritz_values != 0)

    def replace() -> None:
        momentum = flat_momentum(job, state.layout.length)
        state.existing_subspace.replace(
            ritz_values, directions, group, momentum
        )
        state.estimations.assign_add(1)

    when(usable, replace)


def flat_gradient(step: Step, length: int | None = None) -> tf.Tensor:
    """The gradients of a step as a vector; zeros for a missing gradient."""
    weights = step.job.model.trainable_variables
    present = [g for g in step.gradients if g is not None]
    by_weight: list[tf.Tensor | None] = [None] * len(weights)
    for index, gradient in zip(indices_in(step, weights), present, strict=True):
        by_weight[index] = tf.convert_to_tensor(gradient)
    return flat_space(weights).join(by_weight, length)


def flat_weights(model: keras.Model) -> tf.Tensor:
    """A copy of this replica's weights, as a vector."""
    weights = model.trainable_variables
    return flat_space(weights).join([tf.identity(v.value) for v in weights])


def add_to_weights(
    model: keras.Model, change: tf.Tensor, places: Iterable[int] | None = None
) -> None:
    """Add a vector to this replica's weights, or to the weights at `places`."""
    weights = model.trainable_variables
    changes = flat_space(weights).split(change)
    for i in range(len(weights)) if places is None else places:
        replica_copy(weights[i].value).assign_add(changes[i])


@dataclasses.dataclass(frozen=True)
class SplitUpdate:
    """Run one update of FOSI (algorithm 3) on a worker.

    With `c = V^T g` and the inner optimizer's weight change d for the gradient
    `g - V c`: `w += s (d - V V^T d) - alpha V (m / |lambda|)`.

    In general, d is known only after the inner step, and V is read four times.
    For plain SGD, V is read twice: `V^T (g - V c) = 0`, so `V^T d` is the
    decaying SGD momentum from before the last estimation.
    """

    step: Step  # the group of the step holds the workers
    state: State
    rate: NewtonRate
    momentum: float  # momentum of the Newton steps
    rate_clip: float  # upper bound of s

    def make(self) -> Update:
        """Split the gradients; return the gradients for the inner optimizer."""
        weights = self.step.job.model.trainable_variables
        all_present = len(indices_in(self.step, weights)) == len(weights)
        if all_present and is_plain_sgd(self.step.job):
            # `V^T d` is known before the inner step: no projection of d.
            _, remainders = self._split(self._sgd_step)
            if not self._scales_rate():
                return Update(remainders)
            add = self._add_after(lambda d: (self._rate_scale() - 1) * d)
            return Update(remainders, add)
        coefficients, remainders = self._split()
        accumulated = self.state.existing_subspace.accumulated
        if accumulated is not None:  # the mean over accumulation steps
            steps = self.step.job.inner_optimizer.gradient_accumulation_steps
            accumulated.assign_add(coefficients / steps)
        add = self._add_after(lambda d: self._correct(d, coefficients))
        return Update(remainders, add)

    # ---------------------------------------------------------- the gradient
    def _split(
        self, subspace_step: SubspaceStep | None = None
    ) -> tuple[tf.Tensor, Gradients]:
        """Split the gradient g; add `V subspace_step(V^T g)` to the weights.

        Returns `c = V^T g` and `g - V c`. Without valid directions, returns
        zeros and g, and does not change the weights.
        """
        step, state = self.step, self.state
        weights = step.job.model.trainable_variables
        space, order = flat_space(weights), indices_in(step, weights)
        dense = [
            tf.convert_to_tensor(g) for g in step.gradients if g is not None
        ]
        zeros = tf.zeros_like(state.existing_subspace.momentum)

        def project() -> list[tf.Tensor]:
            gradient = flat_gradient(step, state.layout.length)
            subspace = state.existing_subspace
            split = subspace.project_out(gradient, step.group, subspace_step)
            if subspace_step is not None:
                model, change = step.job.model, split.step
                when(split.valid, lambda: add_to_weights(model, change))
            remainders = space.split(split.remainder)
            results = [split.coefficients, *(remainders[i] for i in order)]
            return [split.valid, *(tf.identity(x) for x in results)]

        has_directions = state.estimations > 0
        # `valid` is equal on all replicas: all take the same branch.
        valid, *results = tf.cond(
            has_directions,
            project,
            lambda: [tf.constant(False), zeros, *map(tf.zeros_like, dense)],
        )
        invalid = has_directions & ~valid
        count_each(
            invalid,
            state.forgotten,
            [step.job.name],
            "the directions of curvature are not orthonormal or not finite; "
            "they are dropped and estimated again.",
        )
        when(invalid, state.forget)
        # Keep the gradients of an invalid split; sum them if they are local.
        is_local = state.layout.reduces_gradients
        total = step.group.all_reduce if is_local else list
        coefficients, *remainders = tf.cond(
            valid, lambda: results, lambda: [zeros, *total(dense)]
        )
        remainder = iter(remainders)
        return coefficients, [
            None if g is None else next(remainder) for g in step.gradients
        ]

    # -------------------------------------------------------------- plain SGD
    def _sgd_step(self, coefficients: tf.Tensor) -> tf.Tensor:
        """Change along V, see the class: `-alpha m / |lambda| - s V^T d`.

        SGD's momentum b becomes `mu b - rate (g - V c)`, so V^T b becomes
        `mu V^T b`. Then `V^T d = V^T b`, or `mu V^T b` with Nesterov momentum.
        """
        inner = self.step.job.inner_optimizer
        change = -self._newton(coefficients)
        inner_momentum = self.state.existing_subspace.inner_momentum
        if inner_momentum is not None:
            projected = inner_momentum.assign(inner.momentum * inner_momentum)
            if inner.nesterov:
                projected = inner.momentum * projected
            change -= self._rate_scale() * projected
        # Check only p: V p is then finite, because `max |V p| <= |p|`.
        return zero_unless_finite(change)

    # --------------------------------------------------- any inner optimizer
    def _add_after(
        self, correction: Callable[[tf.Tensor], tf.Tensor]
    ) -> Callable[[], None]:
        """Callback that adds `correction(d)` after the inner step."""
        model, length = self.step.job.model, self.state.layout.length
        weights = model.trainable_variables
        space = flat_space(weights)
        order = indices_in(self.step, weights)
        old_values = [tf.identity(v.value) for v in weights]

        def add() -> None:
            changes = map(tf.subtract, [v.value for v in weights], old_values)
            change = space.join(list(changes), length)
            # Weights without a gradient stay unchanged.
            add_to_weights(model, zero_unless_finite(correction(change)), order)

        def after() -> None:
            when(self.state.estimations > 0, add)

        return after

    def _correct(self, change: tf.Tensor, coefficients: tf.Tensor) -> tf.Tensor:
        """`(s - 1) d - s V V^T d - alpha V (m / |lambda|)` for a change d."""
        subspace, group = self.state.existing_subspace, self.step.group
        projected = subspace.coefficients(change, group)
        momentum = flat_momentum(self.step.job, self.state.layout.length)
        if momentum is not None:  # some weights have no gradient
            subspace.project_momentum(momentum, group)
        if subspace.accumulated is not None:
            coefficients = tf.identity(subspace.accumulated)
            subspace.accumulated.assign(tf.zeros_like(coefficients))
        newton = self._newton(coefficients)
        if not self._scales_rate():
            return -subspace.combine([projected, newton], group)
        scale = self._rate_scale()
        combined = subspace.combine([scale * projected, newton], group)
        return (scale - 1) * change[: combined.shape[0]] - combined

    # ----------------------------------------------- every inner optimizer
    def _newton(self, coefficients: tf.Tensor) -> tf.Tensor:
        """Update m; return `alpha m / |lambda|` of the local directions."""
        subspace, step = self.state.existing_subspace, self.step
        clipped = subspace.clip_outlier(coefficients, step.group)
        momentum = subspace.momentum.assign(
            self.momentum * subspace.momentum + clipped
        )
        alpha = tf.cast(self.rate.at(step.job, self.state), momentum.dtype)
        return alpha * momentum * subspace.inverse_curvature(step.group.rank)

    def _scales_rate(self) -> bool:
        """Return True if the factor s of the rate may differ from 1."""
        inner = self.step.job.inner_optimizer
        return isinstance(inner, keras.optimizers.SGD) and self.rate_clip > 1

    def _rate_scale(self) -> tf.Tensor:
        """`s = clip(lambda_max / lambda_k, 1, rate_clip)`."""
        largest = self.state.layout.geometry.largest
        values = tf.convert_to_tensor(self.state.existing_subspace.ritz_values)
        top, kth = values[-1], values[-max(largest, 1)]
        # The upper bound if `lambda_k <= 0 < lambda_max`; 1 if no `lambda > 0`.
        ratio = tf.math.divide_no_nan(top, kth)
        ratio = tf.where(kth > 0, ratio, values.dtype.max)
        ratio = tf.where(top > 0, ratio, tf.ones_like(ratio))
        return tf.clip_by_value(ratio, 1.0, self.rate_clip)
