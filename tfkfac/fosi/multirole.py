"""MR-DHO2: accelerators estimate the curvature while workers train."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.layers import BatchNormalization
from typing_extensions import override

from tfkfac.capture.model_taps import (
    ForwardCall,
    ForwardTap,
    TraceLists,
    capturing,
)
from tfkfac.capture.walk import walk
from tfkfac.checks import is_number
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import (
    exact_second_derivatives,
    in_graph,
    replica_copy,
)
from tfkfac.compat.optimizers import raw_iterations
from tfkfac.compat.overrides import Below, replace_moments
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import Roles, assign_roles
from tfkfac.fosi import update
from tfkfac.fosi.estimation import (
    Accelerator,
    Estimation,
    Spectrum,
    estimation_bytes,
)
from tfkfac.fosi.layouts import Geometry, Layout
from tfkfac.fosi.method import FOSIMethod, Settings
from tfkfac.fosi.subspace import State, Subspace
from tfkfac.loss.batch import find_call
from tfkfac.saving.entries import Contents
from tfkfac.saving.slots import Slots
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update

# Default steps between estimations if there are accelerators.
_ACCELERATED_INTERVAL = 800


class FinalUpdate(Slots):
    """A Newton step with the sum of an interval's gradients (DHO2, eq. 17).

    For weights w at the start of the interval, the inner optimizer's total
    change d and the sum p of its gradients, the new weights are
    `w + d - V V^T d - alpha V (V^T p / |lambda|)`. The state is not saved:
    after loading, the interval starts again.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("final_update", saved=False)
        sizes = [geometry.size], geometry.dtype
        self.start = self.slot("start", *sizes)
        self.gradient_sum = self.slot("gradient_sum", *sizes)

    @staticmethod
    def change_bytes(layout: Layout) -> int:
        """Bytes that a worker receives in `change`."""
        return 2 * layout.coefficients_bytes + layout.combine_bytes

    def begin(self, weights: tf.Tensor) -> None:
        """Begin an interval at the given weights."""
        self.start.assign(weights)
        self.gradient_sum.assign(tf.zeros_like(weights))

    def change(
        self,
        weights: tf.Tensor,
        subspace: Subspace,
        alpha: tf.Tensor,
        group: Communicator,
    ) -> tf.Tensor:
        """Return the correction of the weights at the end of the interval."""
        total = tf.convert_to_tensor(self.gradient_sum)
        coefficients = subspace.coefficients(total, group)
        inner = subspace.coefficients(weights - self.start, group)
        newton = alpha * coefficients * subspace.inverse_curvature(group.rank)
        return -subspace.combine([newton + inner], group)


class RoleState(State):
    """State of a worker (trains) or an accelerator (estimates curvature)."""

    def __init__(
        self,
        layout: Layout,
        subspace: Subspace | None,
        accelerator: Accelerator | None,
        final_update: FinalUpdate | None,
    ) -> None:
        super().__init__(layout, subspace)
        self.accelerator = accelerator  # None on workers
        # None on accelerators, and for `final_update="stale"`.
        self.final_update = final_update
        # Number of finished Lanczos iterations; 0 between estimations.
        self.progress = self.slot("progress", saved=False)

    @override
    def forget(self) -> None:
        """Drop the directions; the running estimation finds new directions."""
        # Keep `last`: the schedules of all replicas must agree.
        last = tf.identity(self.last)
        super().forget()
        self.last.assign(last)

    @override
    def contents(self) -> Contents:
        """Return the state to save, without the estimation in progress."""
        # No file has the section "estimation", so every load resets the
        # progress on all replicas. The next interval starts a new estimation.
        resets = {"estimation": lambda: self.progress.assign(0)}
        return dataclasses.replace(super().contents(), optional_sections=resets)


class MultiRoleMethod(FOSIMethod):
    """FOSI where accelerators estimate while workers train (MR-DHO2).

    During an interval, the accelerators run a Lanczos estimation at the
    interval's first weights, on their parts of its first batch, a few
    iterations per step (DHO2, section IV). At the end of the interval, the
    workers receive the result. After every step the accelerators receive all
    variables of the model from the first worker, so metrics, evaluation and
    saving work on every replica.
    """

    roles: Roles
    states: Sequence[RoleState] = ()

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.update_interval.get() is None:
            settings.update_interval.set(_ACCELERATED_INTERVAL)

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        super().attach(job)
        # `assign_roles` rejects a fraction that leaves a role without replicas.
        self.roles = assign_roles(
            job.topology.replicas, self.settings.accelerator_fraction
        )
        groups: TraceLists[Communicator] = TraceLists()

        def total(value: tf.Tensor) -> tf.Tensor:
            """Sum moments of batches over the replicas of the same role."""
            if not self.roles.trains(self.job.rank):
                # Accelerators run no backward pass: scale the local value.
                return value * len(self.roles.accelerators)
            group = groups.current()
            if not group:
                everyone = self.job.group("moments")
                group.append(everyone.among(self.peers(everyone.rank)))
            return group[0].differentiable_sum(value)

        def moments(original: Below, /, *args: Any) -> Any:
            """Sum the batch moments of a layer in training steps."""
            if not capturing():
                return original(*args)
            with exact_second_derivatives(total):
                return original(*args)

        for node in walk(job.model):
            normalizes = isinstance(node.layer, BatchNormalization)
            if normalizes and node.layer.synchronized:
                replace_moments(node.layer, moments)

    @override
    def peers(self, rank: int) -> tuple[int, ...]:
        return self.roles.peers(rank)

    @override
    def new(self, rank: int, layout: Layout) -> RoleState:
        subspace = accelerator = final = None
        if self.roles.trains(rank):
            subspace = Subspace(layout, self.inner(), rank)
            if self.settings.final_update == "paper":
                final = FinalUpdate(layout.geometry)
        else:
            count = len(self.roles.accelerators)
            accelerator = Accelerator(layout.geometry, count)
        return RoleState(layout, subspace, accelerator, final)

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """Run a step (DHO2, algorithm 3 and section IV)."""
        model, state = self.job.model, self.job.local_state(self.states)
        self.rate.record_largest(self.job, state)
        calls = ForwardTap.open(model).pop_items()
        everyone = step.group
        role_step = step.among(self.peers(everyone.rank))
        begins, target = self._schedule(state)
        if state.accelerator is not None:
            call = find_call(model, step.batch, calls)
            self._accelerate(state, role_step, call, begins, target)
        elif state.final_update is not None:
            # Add the gradient to the sum of gradients.
            final = state.final_update
            role_step.reduce()
            when(begins, lambda: final.begin(update.flat_weights(model)))

            def direction() -> Update:
                final.gradient_sum.assign_add(update.flat_gradient(role_step))
                return Update(role_step.gradients)

            role_step.check_finite()
            role_step.apply(direction)
        else:
            self.train(role_step, state, lambda: None)
        state.progress.assign(target)
        # Wait for all replicas; copy the step counts to accelerators.
        streak = self.job.local_state(self.job.streaks)
        counter = replica_copy(raw_iterations(self.job.inner_optimizer).value)
        counts = [tf.cast(v, tf.float64) for v in (counter, *streak.variables)]
        gathered = everyone.all_gather(tf.stack(counts))
        if state.accelerator is not None:
            count, *values = tf.unstack(gathered[self.roles.workers[0]])
            counter.assign(tf.cast(count, counter.dtype))
            streak.assign(values, step.gradient_paths())
        self._hand_over(state, role_step.group, everyone)
        # Broadcast the first worker's variables to the accelerators.
        variables, sender = all_variables(model), self.roles.workers[0]
        values = [tf.cast(v.value, wire_type(v)) for v in variables]
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        members = (sender, *self.roles.accelerators)
        received = everyone.broadcast(values, specs, sender, members)
        if state.accelerator is not None and received is not None:
            for variable, value in zip(variables, received, strict=True):
                local = replica_copy(variable.value)
                local.assign(tf.cast(value, local.dtype))

    def _schedule(self, state: RoleState) -> tuple[tf.Tensor, tf.Tensor]:
        """Return whether an estimation begins, and the next `progress`.

        Both are equal on all replicas.
        """
        clock = self.job.clock
        idle = tf.equal(state.progress, 0)
        begins = self.timing.begins(clock, state) & idle
        state.last.assign(tf.where(begins, clock, state.last))
        iterations = state.layout.geometry.steps
        steps = tf.constant(iterations, tf.int64)
        elapsed = clock - state.last + 1
        interval = self.timing.interval.at(clock)
        target = tf.minimum(-(-steps * elapsed // interval), steps)
        target = tf.where(begins | ~idle, target, 0)
        limit = iterations  # upper bound for one step
        if is_number(fixed := self.timing.interval.get()):
            limit = math.ceil(iterations / fixed)
        limit += state.progress
        return begins, tf.clip_by_value(target, state.progress, limit)

    def _accelerate(
        self,
        state: RoleState,
        step: Step,
        call: ForwardCall,
        begins: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """Run the Lanczos iterations of a step on an accelerator."""
        accelerator, model = state.accelerator, self.job.model
        assert accelerator is not None
        geometry = state.layout.geometry
        estimation = Estimation(geometry, step.group, self.settings.seed)
        arguments = dict(step.batch.arguments)
        arguments.pop("y_pred", None)
        current = call.args, call.kwargs, arguments, tuple(step.loss.shares)

        def begin() -> None:
            accelerator.begin(current, update.flat_weights(model), estimation)

        def advance() -> tf.Tensor:
            progress = tf.convert_to_tensor(state.progress)
            accelerator.advance(model, current, estimation, progress, target)
            return tf.constant(0)

        when(begins, in_graph(begin))
        # Use `tf.cond`, not `when`, as in `FOSIMethod.estimate`.
        is_due = target > state.progress
        tf.cond(is_due, in_graph(advance), lambda: tf.constant(0))

    def _hand_over(
        self, state: RoleState, peers: Communicator, everyone: Communicator
    ) -> None:
        """Send the directions to the workers at the end of an interval."""
        geometry = state.layout.geometry
        ends = self.timing.ends(self.job.clock, state)
        ends &= tf.equal(state.progress, geometry.steps)

        def send() -> None:
            spectrum = None
            if state.accelerator is not None:
                spectrum = state.accelerator.spectrum()
            received = hand_over(spectrum, state.layout, self.roles, everyone)
            if received is not None:
                update.adopt(state, *received, peers, self.job)
                if state.final_update is not None:
                    weights = update.flat_weights(self.job.model)
                    alpha = self.rate.at(self.job, state)
                    subspace = state.existing_subspace
                    change = state.final_update.change(
                        weights, subspace, tf.cast(alpha, weights.dtype), peers
                    )
                    update.add_to_weights(self.job.model, change)
            state.progress.assign(0)

        when(ends, send)

    # ----------------------------------------------------------- reporting
    @override
    def estimation_state_bytes(self, state: RoleState) -> dict[str, int]:
        basis = copies = 0
        if state.final_update is not None:
            copies = state.final_update.bytes
        if state.accelerator is not None:
            copies = state.layout.geometry.size * state.layout.item
            basis = state.accelerator.bytes - copies
        return {"basis": basis, "copies": copies}

    @override
    def received_bytes(
        self, layout: Layout
    ) -> tuple[dict[str, int], dict[str, int]]:
        rank = self.job.topology.local[0]
        plain, _ = super().received_bytes(layout)
        if not self.roles.trains(rank):
            plain = dict.fromkeys(plain, 0)
            plain["weights"] = sum(
                math.prod(v.shape) * wire_type(v).size
                for v in all_variables(self.job.model)
            )
            replicas = len(self.roles.accelerators)
            lanczos = estimation_bytes(layout.geometry, replicas)
            return plain, {"lanczos": lanczos}
        replacement = Subspace.replace_bytes(layout, self.inner())
        pieces = piece_bytes(layout, self.roles, rank)
        estimation = {"directions": pieces + replacement}
        if self.settings.final_update == "paper":
            plain["projections"] = 0
            estimation["projections"] = FinalUpdate.change_bytes(layout)
        return plain, estimation


# ---------------------------------------------------- messages
def hand_over(
    spectrum: Spectrum | None,
    layout: Layout,
    roles: Roles,
    everyone: Communicator,
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Send each worker all Ritz values and its block of V^T.

    Returns both on a worker, where `spectrum` is None; None on an accelerator.
    """
    dtype, rank = layout.geometry.dtype, everyone.rank
    sender = roles.accelerators[0]
    values = everyone.broadcast(
        None if spectrum is None else [spectrum.values],
        [tf.TensorSpec([layout.geometry.directions], dtype)],
        sender,
        (*roles.workers, sender),
    )
    received_pieces: list[tf.Tensor] = []
    for worker, accelerator, rows, elements, start in pieces(layout, roles):
        shape = [rows.stop - rows.start, elements.stop - elements.start]
        piece = None
        if spectrum is not None and rank == accelerator:
            local = slice(elements.start - start, elements.stop - start)
            piece = [spectrum.rows[rows, local]]
        spec, members = tf.TensorSpec(shape, dtype), (worker, accelerator)
        received = everyone.broadcast(piece, [spec], accelerator, members)
        if rank == worker and received is not None:
            received_pieces += received
    if values is None or not roles.trains(rank):
        return None
    block = tf.concat(received_pieces or [tf.zeros([0, 0], dtype)], 1)
    padding = [
        [0, size - present]
        for size, present in zip(layout.shape, block.shape, strict=True)
    ]
    return values[0], tf.pad(block, padding)


def pieces(
    layout: Layout, roles: Roles
) -> Iterator[tuple[int, int, slice, slice, int]]:
    """Yield the pieces of V^T that accelerators send to workers.

    A piece is (worker, accelerator, directions, elements, first held element).
    """
    shards = layout.geometry.slices(len(roles.accelerators))
    for position, worker in enumerate(roles.workers):
        rows, elements = layout.ranges(position)
        for index, accelerator in enumerate(roles.accelerators):
            sent = shards.local_range(index)
            start = max(elements.start, sent.start)
            stop = min(elements.stop, sent.stop)
            if start < stop and rows.start < rows.stop:
                # `sent.start` is the accelerator's first element.
                yield worker, accelerator, rows, slice(start, stop), sent.start


def piece_bytes(layout: Layout, roles: Roles, rank: int) -> int:
    """Bytes that a replica receives in `hand_over`."""
    count = layout.geometry.directions if roles.trains(rank) else 0
    for worker, _, rows, elements, _ in pieces(layout, roles):
        if worker == rank:
            count += (rows.stop - rows.start) * (elements.stop - elements.start)
    return count * layout.item


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model, sorted by dtype in messages."""
    return sorted(
        [*model.trainable_variables, *model.non_trainable_variables],
        key=lambda v: str(wire_type(v)),
    )


def wire_type(variable: keras.Variable) -> tf.DType:
    """Return the dtype of a variable in messages; int64 if not floating."""
    dtype = tf.as_dtype(variable.dtype)
    return dtype if dtype.is_floating else tf.int64
