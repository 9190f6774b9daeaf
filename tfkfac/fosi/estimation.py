"""The Lanczos estimation of the extreme curvature, and when it is done."""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ForwardCall, ForwardTap
from tfkfac.compat.graphs import in_graph
from tfkfac.curvature.hessian import hessian_operator
from tfkfac.distributed.collectives import Communicator, differentiable_sum
from tfkfac.distributed.wire import all_reduce_bytes, gradient_bytes
from tfkfac.fosi.layouts import Geometry, Layout
from tfkfac.fosi.schedule import Search
from tfkfac.fosi.subspace import Inner, State, Subspace
from tfkfac.fosi.update import adopt, has_momentum, projection_bytes
from tfkfac.linalg.lanczos import (
    Lanczos,
    Product,
    Tridiagonal,
    combine,
    random_vector,
    ritz_pairs,
)
from tfkfac.loss.batch import LossBatch
from tfkfac.loss.replay import find_call
from tfkfac.saving.slots import planned
from tfkfac.training.job import Job
from tfkfac.training.step import Step


class Spectrum(NamedTuple):
    """The result of an estimation.

    Attributes:
        values: Ritz values `(r,)`, ascending, the same bits on every worker;
            NaN if the estimation failed.
        rows: This worker's slices `(r, n / C)` of the Ritz vectors.
    """

    values: tf.Tensor
    rows: tf.Tensor


class Estimation:
    """The distributed Lanczos of one replica (DHO2, algorithm 2).

    Each replica keeps a slice of every row of the basis. The operator is the
    mean of the replicas' local Hessians, each by its share of the examples: a
    local one alone would not be the same on all, and not symmetric.

    Args:
        geometry: Sizes.
        group: The replicas that take part.
        seed: Seed of the start vector.
    """

    def __init__(
        self, geometry: Geometry, group: Communicator, seed: int
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.shards = geometry.slices(group.size)
        self._seed = seed

    def iteration(self, local: Product) -> Lanczos:
        """Returns the iteration for the sum of local operators.

        Args:
            local: Product of a flat vector with the local Hessian, weighted.
        """
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
        return self.draw(tf.constant(-1))

    def draw(self, index: tf.Tensor) -> tf.Tensor:
        """Returns the slice of a random vector with norm of about 1."""
        vector = random_vector(self.geometry.size, self._seed, index + 1)
        own = self.shards.own(vector, self.group.rank)
        return tf.cast(own, self.geometry.dtype)

    def spectrum(
        self, tridiagonal: Tridiagonal, matrices: Sequence[tf.Tensor]
    ) -> Spectrum:
        """Returns the Ritz pairs.

        Args:
            tridiagonal: What the iterations made.
            matrices: The rows of the basis (slices).
        """
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
        made = iteration.run(self.start(), self.geometry.steps)
        return self.spectrum(*made)


def local_hessian(
    model: keras.Model,
    batch: LossBatch,
    call: ForwardCall,
    estimation: Estimation,
    shares: Sequence[tf.Tensor],
) -> Product:
    """The Hessian of the current batch's loss at the current weights.

    The loss is weighted by this replica's shares before it is differentiated:
    through synchronised layers the Hessian has parts of other losses.
    """
    variables = model.trainable_variables
    return hessian_operator(
        model,
        call,
        dict(batch.arguments),
        variables,
        [tf.identity(v.value) for v in variables],
        estimation.differentiable_sum,
        shares,
    )


def estimation_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes that each of some replicas receives for an estimation."""
    item, steps = geometry.dtype.size, geometry.steps
    slices = geometry.slices(replicas).length * (replicas - 1)
    # For the start, and twice for the orthogonalisation of each iteration (a
    # third time only where a Krylov space is exhausted).
    sums = (1 + 2 * steps) * all_reduce_bytes((steps + 1) * item, replicas)
    # A row is gathered and its product reduced to slices.
    return 2 * steps * slices * item + sums


# Does the step of a replica that trains: with its state, and what renews the
# directions if that is due.
Train = Callable[[Step, State, Callable[[], None]], None]


class Estimator(abc.ABC):
    """Who estimates the directions, and when.

    Args:
        search: Which directions are sought, and when.

    Attributes:
        job: What it is attached to.
        states: What each replica of this process keeps.
    """

    job: Job
    states: Sequence[State] = ()

    def __init__(self, search: Search) -> None:
        self.search = search

    @abc.abstractmethod
    def attach(self, job: Job) -> None:
        """Binds it to a job, whose model may not be built yet."""

    @abc.abstractmethod
    def count_trainers(self, replicas: int) -> int:
        """Number of replicas, of all, that train and share the directions."""

    def peers(self, rank: int) -> tuple[int, ...]:
        """The replicas that a replica shares a mean loss with."""
        return tuple(range(self.job.topology.replicas))

    @abc.abstractmethod
    def create(self, layout: Layout) -> None:
        """Creates the states."""

    @abc.abstractmethod
    def run(self, step: Step, train: Train) -> None:
        """Does a step, in which those that train call `train`."""

    @abc.abstractmethod
    def first(self, updates: int) -> str:
        """When the first estimation comes; empty after that.

        Args:
            updates: Number of updates of the weights so far.
        """

    @abc.abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """Rows of the summary that say who does what."""

    @abc.abstractmethod
    def state_bytes(self, layout: Layout) -> dict[str, int]:
        """Bytes that this replica keeps, by kind."""

    @abc.abstractmethod
    def communication_bytes(self, layout: Layout) -> dict[str, dict[str, int]]:
        """Bytes that this replica receives, by kind of step."""

    def idle_share(self) -> np.ndarray:
        """Share of the time that each replica has waited for the others."""
        return np.zeros(self.job.topology.replicas)

    def new_subspace(self, layout: Layout, rank: int) -> Subspace:
        """The directions of a replica that trains."""
        return Subspace(layout, self.inner(), rank)

    def inner(self) -> Inner:
        """What the inner optimizer is like."""
        accumulation = self.job.inner_optimizer.gradient_accumulation_steps
        return Inner(bool(accumulation), has_momentum(self.job))


class BetweenSteps(Estimator):
    """All replicas train, and estimate together before a step (DHO2)."""

    @override
    def attach(self, job: Job) -> None:
        self.job = job

    @override
    def count_trainers(self, replicas: int) -> int:
        return replicas

    @override
    def create(self, layout: Layout) -> None:
        self.states = self.job.for_each(
            lambda rank: State(layout, self.new_subspace(layout, rank))
        )

    @override
    def run(self, step: Step, train: Train) -> None:
        model, state = self.job.model, self.job.own(self.states)
        call = find_call(model, step.batch, ForwardTap.open(model).take())
        train(step, state, lambda: self.estimate(step, state, call))

    def estimate(self, step: Step, state: State, call: ForwardCall) -> None:
        """A Lanczos estimation at the current weights, if it is due."""
        clock = self.job.clock

        def update() -> tf.Tensor:
            geometry, group = state.layout.geometry, step.group
            estimation = Estimation(geometry, group, self.search.seed)
            local = local_hessian(
                self.job.model, step.batch, call, estimation, step.loss.shares
            )
            found = estimation.run(local)
            part = state.layout.arrange(found.rows, group)
            adopt(state, found.values, part, group, self.job)
            return state.last.assign(clock)

        due = self.search.timing.begins(clock, state)
        last = state.last
        tf.cond(due, in_graph(update), lambda: tf.convert_to_tensor(last))

    @override
    def first(self, updates: int) -> str:
        warmup = self.search.timing.first(self.states)
        if updates > warmup:
            return ""
        return f"the first before update {warmup + 1:,}"

    @override
    def rows(self) -> list[tuple[str, str]]:
        replicas = self.job.topology.replicas
        if replicas == 1:
            return []
        workers = ", ".join(map(str, range(replicas)))
        return [("Workers", workers), ("Accelerators", "-")]

    @override
    def state_bytes(self, layout: Layout) -> dict[str, int]:
        with planned():
            state = State(layout, self.new_subspace(layout, 0))
        geometry, length = layout.geometry, layout.elements.length
        basis = geometry.steps * length * geometry.dtype.size
        return kinds_of_state(state, basis, copies=0)

    @override
    def communication_bytes(self, layout: Layout) -> dict[str, dict[str, int]]:
        gradients = gradient_bytes(
            self.job.model.trainable_variables, self.job.topology.hint
        )
        plain = layout.step_bytes(gradients, projection_bytes(self.job, layout))
        return {
            "warmup": {**plain, "projections": 0},
            "plain": plain,
            "estimation": {
                **plain,
                "lanczos": estimation_bytes(layout.geometry, layout.workers),
                "directions": layout.arrangement_bytes()
                + Subspace.carrying_bytes(layout, self.inner()),
            },
        }


def kinds_of_state(state: State, basis: int, copies: int) -> dict[str, int]:
    """Bytes of a replica's state by kind, with their total.

    Args:
        state: The state.
        basis: Bytes of the Lanczos basis.
        copies: Bytes of copies of weights and batches.
    """
    subspace = state.subspace
    kinds = {
        "directions": 0 if subspace is None else subspace.bytes,
        "basis": basis,
        "copies": copies,
        "counters": state.bytes,
    }
    return {**kinds, "total": sum(kinds.values())}
