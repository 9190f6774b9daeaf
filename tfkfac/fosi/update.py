"""One update of the weights: Newton in the directions, another on the rest."""

import dataclasses
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfkfac.compat.functions import when
from tfkfac.compat.graphs import own_copy
from tfkfac.compat.optimizers import sgd_momenta
from tfkfac.curvature.hessian import flat_space
from tfkfac.distributed.collectives import Communicator
from tfkfac.fosi.layouts import Moves, finite_or_nothing
from tfkfac.fosi.schedule import NewtonRate
from tfkfac.fosi.subspace import State
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job
from tfkfac.training.step import Gradients, Step, Update, places_of


def is_plain_sgd(job: Job) -> bool:
    """True if the inner optimizer's change is a sum of the gradients it got.

    That is SGD, with momentum or without, that neither clips nor accumulates
    them nor decays weights, and does not round them to less precision than
    that of the directions.
    """
    inner, weights = job.inner_optimizer, job.model.trainable_variables
    others = (
        inner.weight_decay,
        inner.clipnorm,
        inner.clipvalue,
        inner.global_clipnorm,
        inner.gradient_accumulation_steps,
    )
    return (
        type(inner) is keras.optimizers.SGD
        and not any(others)
        and {tf.as_dtype(v.dtype) for v in weights}
        == {flat_space(weights).dtype}
    )


def has_momentum(job: Job) -> bool:
    """True for plain SGD with momentum."""
    return is_plain_sgd(job) and job.inner_optimizer.momentum > 0


def flat_momentum(job: Job, length: int) -> tf.Tensor | None:
    """Plain SGD's momentum as a vector that ends in zeros; None without."""
    if not has_momentum(job):
        return None
    weights = job.model.trainable_variables
    momenta = sgd_momenta(job.inner_optimizer, weights)
    return flat_space(weights).join([b.value for b in momenta], length)


def adopt(
    state: State,
    values: tf.Tensor,
    part: tf.Tensor,
    group: Communicator,
    job: Job,
) -> None:
    """Uses new directions from now on, if they are any good."""
    # The same bits on every replica, so all take the same branch.
    finite = tf.reduce_all(tf.math.is_finite(values))
    count_each(
        tf.logical_not(finite),
        state.failures,
        [job.name],
        "an estimation of curvature is not finite and left out.",
    )
    # An empty batch has no curvature; what is known of others is kept.
    usable = finite & tf.reduce_any(values != 0)

    def replace() -> None:
        momentum = flat_momentum(job, state.layout.length)
        state.existing_subspace.replace(values, part, group, momentum)
        state.estimations.assign_add(1)

    when(usable, replace)


def flat_gradient(step: Step, length: int | None = None) -> tf.Tensor:
    """The gradients of a step as a vector, zero where there is none."""
    weights = step.job.model.trainable_variables
    present = [g for g in step.gradients if g is not None]
    ordered: list[tf.Tensor | None] = [None] * len(weights)
    for place, gradient in zip(places_of(step, weights), present, strict=True):
        ordered[place] = tf.convert_to_tensor(gradient)
    return flat_space(weights).join(ordered, length)


def flat_weights(model: keras.Model) -> tf.Tensor:
    """A copy of this replica's weights, as a vector."""
    weights = model.trainable_variables
    values = [tf.identity(v.value) for v in weights]
    return flat_space(weights).join(values)


def add_to_weights(
    model: keras.Model, change: tf.Tensor, places: Iterable[int] | None = None
) -> None:
    """Adds a vector to this replica's weights, or to those at some places."""
    weights = model.trainable_variables
    parts = flat_space(weights).split(change)
    for i in range(len(weights)) if places is None else places:
        own_copy(weights[i].value).assign_add(parts[i])


@dataclasses.dataclass(frozen=True)
class SplitUpdate:
    """An update of FOSI (algorithm 3), of a replica that trains.

    With the inner optimizer's change d of the weights, for `g - V c`,

    `w += s (d - V V^T d) - alpha V (m / |lambda|)`.

    For most inner optimizers d is known when it is done, and V is read four
    times. That of plain SGD is a sum of gradients, and `g - V c` has nothing
    in the directions: in them d is the part of SGD's momentum, which is from
    before the last estimation and decays, and V is read twice.
    """

    step: Step  # among those that train
    state: State
    rate: NewtonRate
    momentum: float  # of the Newton steps
    rate_clip: float  # largest factor s on the inner optimizer's change

    def make(self) -> Update:
        """Splits the gradients; the rest follows the inner optimizer."""
        if self._knows_change():
            _, rest = self._split(self._moves)
            if not self._scales_rate():
                return Update(rest)
            return Update(rest, self._after(self._stretch))
        inside, rest = self._split()
        self._accumulate(inside)
        return Update(rest, self._after(lambda d: self._correct(d, inside)))

    def _knows_change(self) -> bool:
        """True if the change in the directions is known before it is done."""
        weights = self.step.job.model.trainable_variables
        everywhere = len(places_of(self.step, weights)) == len(weights)
        return everywhere and is_plain_sgd(self.step.job)

    # ---------------------------------------------------------- the gradient
    def _split(self, moves: Moves | None = None) -> tuple[tf.Tensor, Gradients]:
        """Splits the gradient g, and does the moves in the directions.

        Returns `c = V^T g`, and `g - V c` for the inner optimizer; without
        directions, or with some that cannot be right, zeros and g as it is.
        """
        step, state = self.step, self.state
        weights = step.job.model.trainable_variables
        space, order = flat_space(weights), places_of(step, weights)
        dense = [
            tf.convert_to_tensor(g) for g in step.gradients if g is not None
        ]
        nothing = tf.zeros_like(state.existing_subspace.momentum)

        def project() -> list[tf.Tensor]:
            gradient = flat_gradient(step, state.layout.length)
            subspace = state.existing_subspace
            found = subspace.project_out(gradient, step.group, moves)
            if moves is not None:
                model, move = step.job.model, found.moved
                when(found.sound, lambda: add_to_weights(model, move))
            whole = space.split(found.rest)
            parts = [found.inside, *(whole[i] for i in order)]
            return [found.sound, *(tf.identity(x) for x in parts)]

        def without() -> list[tf.Tensor]:
            return [tf.constant(False), nothing, *map(tf.zeros_like, dense)]

        def keep() -> list[tf.Tensor]:
            if state.layout.reduces_gradients:
                return [nothing, *step.group.all_reduce(dense)]
            return [nothing, *dense]

        known = state.estimations > 0
        # The same on every replica, as what it is made of is.
        sound, *found = tf.cond(known, project, without)
        wrong = known & ~sound
        count_each(
            wrong,
            state.forgotten,
            [step.job.name],
            "the directions of curvature are not orthonormal or not finite; "
            "they are dropped, and sought anew.",
        )
        when(wrong, state.forget)
        inside, *parts = tf.cond(sound, lambda: found, keep)
        rest = iter(parts)
        return inside, [
            None if g is None else next(rest) for g in step.gradients
        ]

    # -------------------------------------------------------------- plain SGD
    def _moves(self, inside: tf.Tensor) -> tf.Tensor:
        """All that is done in the directions, of coefficients `c = V^T g`.

        SGD's momentum `b` becomes `mu b - rate (g - V c)`. So V^T b becomes
        `mu V^T b`, and is V^T d; with Nesterov's momentum that is `mu` times
        it.
        """
        inner = self.step.job.inner_optimizer
        move = -self._newton(inside)
        kept = self.state.existing_subspace.inner_momentum
        if kept is not None:
            projected = kept.assign(inner.momentum * kept)
            if inner.nesterov:
                projected = inner.momentum * projected
            move -= self._rate_scale() * projected
        return finite_or_nothing(move)  # no element of V p is larger

    def _stretch(self, change: tf.Tensor) -> tf.Tensor:
        """The correction of a change d that has its part in V already."""
        return (self._rate_scale() - 1) * change

    # --------------------------------------------------- any inner optimizer
    def _accumulate(self, inside: tf.Tensor) -> None:
        """Adds to the mean over as many steps as the inner optimizer takes."""
        accumulated = self.state.existing_subspace.accumulated
        if accumulated is not None:
            steps = self.step.job.inner_optimizer.gradient_accumulation_steps
            accumulated.assign_add(inside / steps)

    def _after(
        self, added: Callable[[tf.Tensor], tf.Tensor]
    ) -> Callable[[], None]:
        """The addition to the weights after the inner optimizer's change d.

        That is the difference to what they were before.
        """
        model = self.step.job.model
        weights = model.trainable_variables
        space, length = flat_space(weights), self.state.layout.length
        order = places_of(self.step, weights)
        before = [tf.identity(v.value) for v in weights]

        def add() -> None:
            changes = map(tf.subtract, [v.value for v in weights], before)
            change = space.join(list(changes), length)
            # Weights without a gradient stay as they are.
            add_to_weights(model, finite_or_nothing(added(change)), order)

        def after() -> None:
            when(self.state.estimations > 0, add)

        return after

    def _correct(self, change: tf.Tensor, inside: tf.Tensor) -> tf.Tensor:
        """The correction of the inner optimizer's change d of the weights.

        `(s - 1) d - s V V^T d - alpha V (m / |lambda|)`
        """
        subspace, group = self.state.existing_subspace, self.step.group
        projected = subspace.coefficients(change, group)
        momentum = flat_momentum(self.step.job, self.state.layout.length)
        if momentum is not None:  # of some weights' gradients only
            subspace.note_momentum(momentum, group)
        if subspace.accumulated is not None:
            inside = tf.identity(subspace.accumulated)
            subspace.accumulated.assign(tf.zeros_like(inside))
        newton = self._newton(inside)
        if not self._scales_rate():
            return -subspace.combine([projected, newton], group)
        scale = self._rate_scale()
        moved = subspace.combine([scale * projected, newton], group)
        return (scale - 1) * change[: moved.shape[0]] - moved

    # ------------------------------------------------------------- both
    def _newton(self, inside: tf.Tensor) -> tf.Tensor:
        """`alpha m / |lambda|` of the own directions, with a new momentum m."""
        subspace, step = self.state.existing_subspace, self.step
        bounded = subspace.bounded(inside, step.group)
        momentum = subspace.momentum.assign(
            self.momentum * subspace.momentum + bounded
        )
        alpha = tf.cast(self.rate.at(step.job, self.state), momentum.dtype)
        return alpha * momentum * subspace.inverse_curvature(step.group.rank)

    def _scales_rate(self) -> bool:
        """True if s can be other than 1: SGD's steps scale with gradients."""
        inner = self.step.job.inner_optimizer
        return isinstance(inner, keras.optimizers.SGD) and self.rate_clip > 1

    def _rate_scale(self) -> tf.Tensor:
        """`s = clip(lambda_max / lambda_k, 1, rate_clip)`."""
        ratio = self.state.existing_subspace.rate_ratio()
        return tf.clip_by_value(ratio, 1.0, self.rate_clip)
