"""The Lanczos estimation of the extreme curvature, and when it is done."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall, ForwardTap
from tfkfac.compat.graphs import in_graph
from tfkfac.curvature.hessian import hessian_operator
from tfkfac.distributed.collectives import (
    Communicator,
    all_reduce_bytes,
    differentiable_sum,
    gradient_bytes,
)
from tfkfac.fosi.layouts import Geometry, Layout
from tfkfac.fosi.schedule import Timing
from tfkfac.fosi.subspace import InnerTraits, State, Subspace
from tfkfac.fosi.update import adopt, has_momentum, is_plain_sgd
from tfkfac.linalg.lanczos import (
    Lanczos,
    Product,
    Tridiagonal,
    combine,
    random_vector,
    ritz_pairs,
)
from tfkfac.loss.batch import find_call
from tfkfac.saving.slots import planned
from tfkfac.training.job import Job
from tfkfac.training.step import Step


class Spectrum(NamedTuple):
    """Ritz values `(r,)`, and this worker's slices of the Ritz vectors.

    The values are ascending, the same bits on every worker, and NaN if the
    estimation failed; the slices are rows `(r, n / C)`.
    """

    values: tf.Tensor
    rows: tf.Tensor


class Estimation:
    """The distributed Lanczos of one replica (DHO2, algorithm 2).

    Each replica keeps a slice of every row of the basis. The operator is the
    mean of the local Hessians of the replicas of a group, each by its share of
    the examples: a local one alone would not be the same on all, and not
    symmetric.
    """

    def __init__(
        self, geometry: Geometry, group: Communicator, seed: int
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.shards = geometry.slices(group.size)
        self._seed = seed

    def iteration(self, local: Product) -> Lanczos:
        """Returns the iteration for the sum of local operators."""
        group = self.group

        def product(row: tf.Tensor) -> tf.Tensor:
            image = local(self.shards.gather(row, group))
            return self.shards.reduce(image, group)

        return Lanczos(product, self.geometry.size, self.draw, self.sum)

    def sum(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sum over the group of numbers, up to one more than steps."""
        if self.group.size == 1:
            return numbers
        # A collective wants a fixed shape, and rows come in.
        count, most = tf.size(numbers), self.geometry.steps + 1
        padded = tf.pad(numbers, [[0, most - count]])
        (total,) = self.group.all_reduce([tf.ensure_shape(padded, [most])])
        return total[:count]

    def differentiable_sum(self, vector: tf.Tensor) -> tf.Tensor:
        """Sum over the group, differentiable any number of times."""
        return differentiable_sum(self.group, vector)

    def start(self) -> tf.Tensor:
        """Returns the slice of the start vector."""
        return self.draw(-1)

    def draw(self, index: int | tf.Tensor) -> tf.Tensor:
        """Returns the slice of a random vector with norm of about 1."""
        vector = random_vector(self.geometry.size, self._seed, index + 1)
        own = self.shards.local_slice(vector, self.group.rank)
        return tf.cast(own, self.geometry.dtype)

    def spectrum(
        self, tridiagonal: Tridiagonal, matrices: Sequence[tf.Tensor]
    ) -> Spectrum:
        """Returns the Ritz pairs."""
        geometry = self.geometry
        pairs = ritz_pairs(tridiagonal, geometry.largest, geometry.smallest)
        weights = tf.cast(pairs.weights, geometry.dtype)
        return Spectrum(
            tf.cast(pairs.values, geometry.dtype),
            combine(matrices, weights),
        )

    def run(self, local: Product) -> Spectrum:
        """Does the whole estimation."""
        iteration = self.iteration(local)
        return self.spectrum(*iteration.run(self.start(), self.geometry.steps))


def estimation_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes that each of some replicas receives for an estimation."""
    item, steps = geometry.dtype.size, geometry.steps
    slices = geometry.slices(replicas).length * (replicas - 1)
    # For the start, and twice for the orthogonalisation of each iteration (a
    # third time only where a Krylov space is exhausted).
    sums = (1 + 2 * steps) * all_reduce_bytes((steps + 1) * item, replicas)
    # A row is gathered and its product reduced to slices.
    return 2 * steps * slices * item + sums


# The step of a replica that trains: with its state, and what renews the
# directions if that is due.
Train = Callable[[Step, State, Callable[[], None]], None]


class Estimator:
    """All replicas train, and estimate together before a step (DHO2)."""

    job: Job
    states: Sequence[State] = ()

    def __init__(self, timing: Timing, seed: int) -> None:
        self.timing = timing
        self.seed = seed

    def attach(self, job: Job) -> None:
        """Binds it to a job, whose model may not be built yet."""
        self.job = job

    def peers(self, rank: int) -> tuple[int, ...]:
        """The replicas that a replica shares a mean loss with."""
        return tuple(range(self.job.topology.replicas))

    def create(self, layout: Layout) -> None:
        """Creates the states."""
        self.states = self.job.for_each(lambda rank: self.new(rank, layout))

    def new(self, rank: int, layout: Layout) -> State:
        """A new state of a replica."""
        return State(layout, Subspace(layout, self.inner(), rank))

    def inner(self) -> InnerTraits:
        """The kind of the inner optimizer."""
        accumulation = self.job.inner_optimizer.gradient_accumulation_steps
        return InnerTraits(bool(accumulation), has_momentum(self.job))

    # ------------------------------------------------------------ the step
    def run(self, step: Step, train: Train) -> None:
        """Does a step, in which those that train call `train`."""
        model, state = self.job.model, self.job.own(self.states)
        call = find_call(model, step.batch, ForwardTap.open(model).take())
        train(step, state, lambda: self.estimate(step, state, call))

    def estimate(self, step: Step, state: State, call: ForwardCall) -> None:
        """A Lanczos estimation at the current weights, if it is due."""
        job, group, clock = self.job, step.group, self.job.clock
        layout = state.layout

        def update() -> tf.Tensor:
            estimation = Estimation(layout.geometry, group, self.seed)
            # The loss has its share before it is differentiated: through
            # synchronised layers the Hessian has parts of other losses.
            local = hessian_operator(
                job.model,
                call,
                dict(step.batch.arguments),
                [tf.identity(v.value) for v in job.model.trainable_variables],
                estimation.differentiable_sum,
                step.loss.shares,
            )
            found = estimation.run(local)
            part = layout.arrange(found.rows, group)
            adopt(state, found.values, part, group, job)
            return state.last.assign(clock)

        # As a `tf.cond`: rounding depends on how a graph is optimised.
        due, last = self.timing.begins(clock, state), state.last
        tf.cond(due, in_graph(update), lambda: tf.convert_to_tensor(last))

    # ----------------------------------------------------------- reporting
    def first(self, updates: int) -> str:
        """The time of the first estimation; empty after that."""
        warmup = self.timing.warmup(self.states)
        if updates > warmup:
            return ""
        return f"the first before update {warmup + 1:,}"

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the summary that say who does what."""
        replicas = self.job.topology.replicas
        if replicas == 1:
            return []
        workers = ", ".join(map(str, range(replicas)))
        return [("Workers", workers), ("Accelerators", "-")]

    def idle_share(self) -> np.ndarray:
        """Share of the time that each replica has waited for the others."""
        return np.zeros(self.job.topology.replicas)

    def state_bytes(self, layout: Layout) -> dict[str, int]:
        """Bytes that this replica keeps, by kind."""
        with planned():
            state = self.new(self.job.topology.local[0], layout)
        kinds = {
            "directions": state.subspace.bytes if state.subspace else 0,
            **self.beside_bytes(state),
            "counters": state.bytes,
        }
        return kinds | {"total": sum(kinds.values())}

    def beside_bytes(self, state: Any) -> dict[str, int]:
        """Bytes of an estimation's basis, and of copies for it."""
        layout = state.layout
        basis = layout.geometry.steps * layout.slices.length * layout.item
        return {"basis": basis, "copies": 0}

    def communication_bytes(self, layout: Layout) -> dict[str, dict[str, int]]:
        """Bytes that this replica receives, by kind of step."""
        plain, estimation = self.traffic(layout)
        return {
            "warmup": plain | {"projections": 0},
            "plain": plain,
            "estimation": plain | estimation,
        }

    def traffic(self, layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of a step without an estimation; other ones of one with it."""
        job = self.job
        weights = job.model.trainable_variables
        gradients = gradient_bytes(weights, job.topology.hint)
        projections = layout.projection_bytes(is_plain_sgd(job))
        plain = {
            "gradients": all_reduce_bytes(gradients, layout.workers),
            "projections": Subspace.clip_bytes(layout) + projections,
            "lanczos": 0,
            "directions": 0,
            "weights": 0,
        }
        carrying = Subspace.replace_bytes(layout, self.inner())
        return plain, {
            "lanczos": estimation_bytes(layout.geometry, layout.workers),
            "directions": layout.arrangement_bytes + carrying,
        }
