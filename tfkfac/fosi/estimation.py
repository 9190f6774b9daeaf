"""Lanczos estimation of the extreme curvature, by all replicas together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from tfkfac.fosi.subspace import InnerTraits, State, Subspace, Timing
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
    """Ritz values `(r,)`, and slices `(r, n / C)` of the Ritz vectors.

    The values are ascending, bitwise equal on all workers, and NaN if the
    estimation failed. The vectors are rows, sliced over C workers.
    """

    values: tf.Tensor
    rows: tf.Tensor


class Estimation:
    """The distributed Lanczos iteration on one replica (DHO2, algorithm 2).

    Each replica keeps a slice of every row of the basis. The operator is the
    mean of the Hessians of the replicas of a group, weighted by their shares
    of the examples. Local Hessians would differ between the slices, so the
    operator would not be symmetric.
    """

    def __init__(
        self, geometry: Geometry, group: Communicator, seed: int
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.shards = geometry.slices(group.size)
        self._seed = seed

    def iteration(self, local: Product) -> Lanczos:
        """Return the iteration for the sum of the local operators."""
        group = self.group

        def product(row: tf.Tensor) -> tf.Tensor:
            image = local(self.shards.gather(row, group))
            return self.shards.reduce(image, group)

        return Lanczos(product, self.geometry.size, self.draw, self.sum)

    def sum(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sum of a vector over the group; at most `steps + 1` elements."""
        if self.group.size == 1:
            return numbers
        # Collectives need a static shape; the number of rows grows.
        count, limit = tf.size(numbers), self.geometry.steps + 1
        padded = tf.pad(numbers, [[0, limit - count]])
        (total,) = self.group.all_reduce([tf.ensure_shape(padded, [limit])])
        return total[:count]

    def differentiable_sum(self, vector: tf.Tensor) -> tf.Tensor:
        """Sum over the group, with derivatives of any order."""
        return differentiable_sum(self.group, vector)

    def start(self) -> tf.Tensor:
        """Return the slice of the start vector."""
        return self.draw(-1)

    def draw(self, index: int | tf.Tensor) -> tf.Tensor:
        """Return the slice of a random vector with a norm of about 1."""
        vector = random_vector(self.geometry.size, self._seed, index + 1)
        local = self.shards.local_slice(vector, self.group.rank)
        return tf.cast(local, self.geometry.dtype)

    def spectrum(
        self, tridiagonal: Tridiagonal, matrices: Sequence[tf.Tensor]
    ) -> Spectrum:
        """Return the Ritz pairs of a tridiagonal matrix and the basis."""
        geometry = self.geometry
        pairs = ritz_pairs(tridiagonal, geometry.largest, geometry.smallest)
        weights = tf.cast(pairs.weights, geometry.dtype)
        return Spectrum(
            tf.cast(pairs.values, geometry.dtype),
            combine(matrices, weights),
        )

    def run(self, local: Product) -> Spectrum:
        """Run the whole estimation for a local operator."""
        iteration = self.iteration(local)
        return self.spectrum(*iteration.run(self.start(), self.geometry.steps))


def estimation_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes that each of several replicas receives in an estimation."""
    item, steps = geometry.dtype.size, geometry.steps
    slices = geometry.slices(replicas).length * (replicas - 1)
    # One sum for the start, two for the orthogonalisation in each iteration
    # (three only after a breakdown).
    sums = (1 + 2 * steps) * all_reduce_bytes((steps + 1) * item, replicas)
    # In each iteration, a row is gathered and its product reduce-scattered.
    return 2 * steps * slices * item + sums


# Training step of a replica: called with the step, the state, and a function
# that updates the directions if an estimation is due.
Train = Callable[[Step, State, Callable[[], None]], None]


class Estimator:
    """Schedule where all replicas train, and estimate before a step (DHO2)."""

    job: Job
    states: Sequence[State] = ()

    def __init__(self, timing: Timing, seed: int) -> None:
        self.timing = timing
        self.seed = seed

    def attach(self, job: Job) -> None:
        """Bind the estimator to a job; its model may not be built yet."""
        self.job = job

    def peers(self, rank: int) -> tuple[int, ...]:
        """The replicas whose mean loss a replica trains on."""
        return tuple(range(self.job.topology.replicas))

    def create(self, layout: Layout) -> None:
        """Create the states of the local replicas."""
        self.states = self.job.for_each(lambda rank: self.new(rank, layout))

    def new(self, rank: int, layout: Layout) -> State:
        """Create the state of a replica."""
        return State(layout, Subspace(layout, self.inner(), rank))

    def inner(self) -> InnerTraits:
        """Properties of the inner optimizer that decide the state."""
        accumulation = self.job.inner_optimizer.gradient_accumulation_steps
        return InnerTraits(bool(accumulation), has_momentum(self.job))

    # ------------------------------------------------------------ the step
    def run(self, step: Step, train: Train) -> None:
        """Run a step; training replicas call `train`."""
        model, state = self.job.model, self.job.local_state(self.states)
        call = find_call(model, step.batch, ForwardTap.open(model).pop_items())
        train(step, state, lambda: self.estimate(step, state, call))

    def estimate(self, step: Step, state: State, call: ForwardCall) -> None:
        """Run a Lanczos estimation at the current weights, if it is due."""
        job, group, clock = self.job, step.group, self.job.clock
        layout = state.layout

        def update() -> tf.Tensor:
            estimation = Estimation(layout.geometry, group, self.seed)
            # The shares weigh the loss before differentiation: synchronised
            # layers mix the losses of replicas in the Hessian.
            local = hessian_operator(
                job.model,
                call,
                dict(step.batch.arguments),
                [tf.identity(v.value) for v in job.model.trainable_variables],
                estimation.differentiable_sum,
                step.loss.shares,
            )
            spectrum = estimation.run(local)
            directions = layout.arrange(spectrum.rows, group)
            adopt(state, spectrum.values, directions, group, job)
            return state.last.assign(clock)

        # A `tf.cond`, not `when`: rounding depends on graph optimisations.
        due, last = self.timing.begins(clock, state), state.last
        tf.cond(due, in_graph(update), lambda: tf.convert_to_tensor(last))

    # ----------------------------------------------------------- reporting
    def first(self, updates: int) -> str:
        """Text on the time of the first estimation; empty after it."""
        warmup = self.timing.warmup(self.states)
        if updates > warmup:
            return ""
        return f"the first before update {warmup + 1:,}"

    def rows(self) -> list[tuple[str, str]]:
        """Summary rows of the roles of the replicas."""
        replicas = self.job.topology.replicas
        if replicas == 1:
            return []
        workers = ", ".join(map(str, range(replicas)))
        return [("Workers", workers), ("Accelerators", "-")]

    def state_bytes(self, layout: Layout) -> dict[str, int]:
        """Bytes of this replica's state, by name."""
        with planned():
            state = self.new(self.job.topology.local[0], layout)
        sizes = {
            "directions": state.subspace.bytes if state.subspace else 0,
            **self.estimation_state_bytes(state),
            "counters": state.bytes,
        }
        return sizes | {"total": sum(sizes.values())}

    def estimation_state_bytes(self, state: Any) -> dict[str, int]:
        """Bytes of the Lanczos basis and of copies for an estimation."""
        layout = state.layout
        basis = layout.geometry.steps * layout.slices.length * layout.item
        return {"basis": basis, "copies": 0}

    def communication_bytes(self, layout: Layout) -> dict[str, dict[str, int]]:
        """Bytes that this replica receives, by type of step."""
        plain, estimation = self.received_bytes(layout)
        return {
            "warmup": plain | {"projections": 0},
            "plain": plain,
            "estimation": plain | estimation,
        }

    def received_bytes(
        self, layout: Layout
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes received in a plain step; the keys changed by an estimation."""
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
        replacement = Subspace.replace_bytes(layout, self.inner())
        return plain, {
            "lanczos": estimation_bytes(layout.geometry, layout.workers),
            "directions": layout.arrangement_bytes + replacement,
        }
