"""Which directions of a model are sought, and how new ones are taken over."""

import dataclasses
import warnings
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfkfac.compat.variables import own_copy
from tfkfac.curvature.hessian import flat_space
from tfkfac.distributed.collectives import Communicator
from tfkfac.fosi.layouts import Geometry
from tfkfac.fosi.plain_sgd import flat_momentum
from tfkfac.fosi.state import State
from tfkfac.fosi.timing import Timing
from tfkfac.linalg.lanczos import default_steps
from tfkfac.training.guards import count_events
from tfkfac.training.job import Job
from tfkfac.training.step import Step, places_of


@dataclasses.dataclass(frozen=True)
class Search:
    """Which directions are sought, and when.

    Attributes:
        num_largest: Number of directions of largest curvature.
        num_smallest: Number of directions of smallest curvature.
        lanczos_steps: Products of an estimation; None is the default.
        seed: Seed of the start vector.
        timing: When they are estimated.
    """

    num_largest: int
    num_smallest: int
    lanczos_steps: int | None
    seed: int
    timing: Timing

    def geometry(self, job: Job) -> Geometry:
        """Sizes; never more directions or steps than weights."""
        space = flat_space(job.model.trainable_variables)
        largest = min(self.num_largest, space.size)
        smallest = min(self.num_smallest, space.size - largest)
        steps = self.lanczos_steps
        if steps is None:
            steps = default_steps(space.size, largest + smallest)
        steps = min(steps, space.size)
        return Geometry(space.size, largest, smallest, steps, space.dtype)

    def warn_if_fewer(self, job: Job, geometry: Geometry) -> None:
        """Says if the model has not as many directions as were asked for."""
        asked = self.num_largest + self.num_smallest
        if geometry.directions < asked:
            warnings.warn(
                f"Model '{job.model.name}' has {geometry.size} weights: "
                f"optimizer '{job.name}' uses {geometry.directions} "
                f"directions, not {asked}.",
                stacklevel=2,
            )


def adopt(
    state: State,
    values: tf.Tensor,
    part: tf.Tensor,
    group: Communicator,
    job: Job,
) -> None:
    """Uses new directions from now on, if they are any good.

    Args:
        state: What this replica keeps.
        values: Ritz values `(r,)`, ascending.
        part: This replica's part of the directions, in its layout.
        group: The replicas that share the directions.
        job: The job.
    """
    subspace = state.subspace
    assert subspace is not None
    # The same bits on every replica, so all take the same branch.
    finite = tf.reduce_all(tf.math.is_finite(values))
    count_events(
        [tf.logical_not(finite)],
        [state.failures],
        [job.name],
        "an estimation of curvature is not finite and left out.",
    )
    # An empty batch has no curvature; what is known of others is kept.
    usable = finite & tf.reduce_any(values != 0)

    def replace() -> tf.Tensor:
        momentum = flat_momentum(job, state.layout.length)
        subspace.replace(values, part, group, momentum)
        return state.estimations.assign_add(1)

    count = state.estimations
    tf.cond(usable, replace, lambda: tf.convert_to_tensor(count))


def flat_gradient(step: Step, length: int | None = None) -> tf.Tensor:
    """The gradients of a step as a vector, zero where there is none.

    Args:
        step: The step.
        length: Length of the vector, where it is to end in zeros.
    """
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
