"""MR-DHO2: accelerators work out the curvature while workers train."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from keras.layers import BatchNormalization
from typing_extensions import override

from tfkfac.capture.model_taps import (
    ForwardCall,
    ForwardTap,
    Notes,
)
from tfkfac.capture.walk import walk
from tfkfac.checks import is_number
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import in_graph, own_copy, stamp_time
from tfkfac.compat.optimizers import raw_iterations
from tfkfac.distributed.collectives import Communicator, differentiable_sum
from tfkfac.distributed.topology import Roles, assign_roles
from tfkfac.fosi.accelerator import Accelerator, loss_point
from tfkfac.fosi.estimation import (
    Estimation,
    Estimator,
    Train,
    estimation_bytes,
)
from tfkfac.fosi.handover import (
    FinalUpdate,
    all_variables,
    hand_over,
    piece_bytes,
    tap_moments,
    wire_type,
)
from tfkfac.fosi.layouts import Layout
from tfkfac.fosi.schedule import NewtonRate, Timing
from tfkfac.fosi.subspace import State, Subspace
from tfkfac.fosi.update import (
    add_to_weights,
    adopt,
    flat_gradient,
    flat_weights,
)
from tfkfac.loss.batch import find_call
from tfkfac.saving.entries import Contents
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update


class RoleState(State):
    """The state of one replica of a job with accelerators.

    Attributes:
        accelerator: The iteration under way; None on workers.
        progress: Number of its iterations done; 0 when none is under way.
        final_update: Only for the published final update, on workers.
        times: Idle and all seconds of each replica `(replicas, 2)`.
        arrived, left: When this replica last did at the end of a step.
    """

    def __init__(
        self,
        layout: Layout,
        subspace: Subspace | None,
        accelerator: Accelerator | None,
        final_update: FinalUpdate | None,
        replicas: int,
    ) -> None:
        super().__init__(layout, subspace)
        self.accelerator = accelerator
        self.final_update = final_update
        self.progress = self.slot("progress", saved=False)

        def seconds(name: str, *shape: int) -> tf.Variable:
            return self.slot(name, shape, "float64", saved=False)

        self.times = seconds("times", replicas, 2)
        self.arrived, self.left = seconds("arrived"), seconds("left")

    @override
    def forget(self) -> None:
        """Drops the directions; those of the interval under way come next."""
        # All replicas count together from the last beginning.
        last = tf.identity(self.last)
        super().forget()
        self.last.assign(last)

    @override
    def contents(self) -> Contents:
        """The state to save, without the estimation under way.

        No file has the section "estimation", so every load resets the progress
        on all replicas. The next interval starts a new estimation.
        """
        parts = {"estimation": lambda: self.progress.assign(0)}
        return dataclasses.replace(super().contents(), parts=parts)


class BesideSteps(Estimator):
    """Some replicas estimate while the others train (DHO2, section IV).

    In an interval the workers train among themselves. The accelerators do a
    Lanczos estimation at the interval's first weights, on their own part of
    the interval's first batch, a few iterations beside each step. At the end
    of the interval the workers take over its result.

    At the end of every step all replicas meet: the accelerators get the
    weights and all other variables of the model from the first worker, so that
    metrics, evaluation and saving are right on every replica.
    """

    roles: Roles
    states: Sequence[RoleState] = ()

    def __init__(
        self,
        timing: Timing,
        seed: int,
        fraction: float,
        final_update: str,
        rate: NewtonRate,
    ) -> None:
        super().__init__(timing, seed)
        self.fraction = fraction
        self.final_update = final_update
        self._rate = rate

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        super().attach(job)
        # A fraction that leaves nobody is refused here, not in the first step.
        self.roles = assign_roles(job.topology.replicas, self.fraction)
        groups: Notes[Communicator] = Notes()
        for node in walk(job.model):
            normalizes = isinstance(node.layer, BatchNormalization)
            if normalizes and node.layer.synchronized:
                tap_moments(node.layer, lambda x: self._sum_moments(groups, x))

    def _sum_moments(
        self, groups: Notes[Communicator], value: tf.Tensor
    ) -> tf.Tensor:
        """Sum of moments over the replicas of the same role."""
        if not self.roles.trains(self.job.rank):
            # Accelerators do no backward pass: nobody would answer in theirs.
            return value * len(self.roles.accelerators)
        mine = groups.here()
        if not mine:
            everyone = self.job.group("moments")
            mine.append(everyone.among(self.peers(everyone.rank)))
        return differentiable_sum(mine[0], value)

    @override
    def peers(self, rank: int) -> tuple[int, ...]:
        return self.roles.peers(rank)

    @override
    def new(self, rank: int, layout: Layout) -> RoleState:
        count = len(self.roles.accelerators)
        subspace = accelerator = final = None
        if self.roles.trains(rank):
            subspace = Subspace(layout, self.inner(), rank)
            if self.final_update == "paper":
                final = FinalUpdate(layout.geometry)
        else:
            accelerator = Accelerator(layout.geometry, count)
        replicas = self.job.topology.replicas
        return RoleState(layout, subspace, accelerator, final, replicas)

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step, train: Train) -> None:
        model, state = self.job.model, self.job.own(self.states)
        calls = ForwardTap.open(model).take()
        everyone = step.group
        mine = step.among(self.peers(everyone.rank))
        begins, target = self._schedule(state)
        if state.accelerator is not None:
            call = find_call(model, step.batch, calls)
            self._accelerate(state, mine, call, begins, target)
        elif state.final_update is not None:
            self._train_and_sum(mine, state.final_update, begins)
        else:
            train(mine, state, lambda: None)
        state.progress.assign(target)
        self._meet(state, step)
        self._hand_over(state, mine.group, everyone)
        self._send_weights(state, everyone)

    def _schedule(self, state: RoleState) -> tuple[tf.Tensor, tf.Tensor]:
        """The part of the estimation that is done beside this step.

        The iterations are spread evenly over the interval. Every replica
        keeps the same count of them. Returns whether an estimation begins, and
        the iterations to have done.
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
        most = iterations  # beside one step
        if is_number(every := self.timing.interval.get()):
            most = math.ceil(iterations / every)
        most += state.progress
        return begins, tf.clip_by_value(target, state.progress, most)

    def _train_and_sum(
        self, step: Step, final: FinalUpdate, begins: tf.Tensor
    ) -> None:
        """The inner optimizer's step; the gradient is remembered."""
        step.reduce()
        when(begins, lambda: final.begin(flat_weights(self.job.model)))

        def direction() -> Update:
            final.gradient_sum.assign_add(flat_gradient(step))
            return Update(step.gradients)

        step.check_finite()
        step.apply(direction)

    def _accelerate(
        self,
        state: RoleState,
        step: Step,
        call: ForwardCall,
        begins: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """An accelerator's part of a step: some Lanczos iterations."""
        accelerator, model = state.accelerator, self.job.model
        assert accelerator is not None
        geometry = state.layout.geometry
        estimation = Estimation(geometry, step.group, self.seed)
        current = loss_point(step.batch, call, step.loss.shares)

        def begin() -> None:
            accelerator.begin(current, flat_weights(model), estimation)

        def advance() -> tf.Tensor:
            done = tf.convert_to_tensor(state.progress)
            accelerator.advance(model, current, estimation, done, target)
            return tf.constant(0)

        when(begins, in_graph(begin))
        # As a `tf.cond`: rounding depends on how a graph is optimised.
        due = target > state.progress
        tf.cond(due, in_graph(advance), lambda: tf.constant(0))

    def _meet(self, state: RoleState, step: Step) -> None:
        """Waits for all; accelerators learn of updates and skipped steps."""
        everyone, streak = step.group, self.job.own(self.job.streaks)
        counter = own_copy(raw_iterations(self.job.inner_optimizer).value)
        done = [tf.identity(counter)]
        if state.accelerator is not None:
            done.append(tf.identity(state.accelerator.tridiagonal.diagonal))
        before = tf.identity(state.left)
        with tf.control_dependencies([*done, before]):
            arrived = stamp_time(state.arrived)
        own = state.times[everyone.rank]
        with tf.control_dependencies([arrived]):
            count = tf.cast(counter, tf.float64)
            skips = streak.told()
        gathered = everyone.all_gather(tf.concat([own, [count], skips], 0))
        with tf.control_dependencies([gathered]):
            left = stamp_time(state.left)
        idle, whole = left - arrived, left - before
        own += tf.where(before > 0, tf.stack([idle, whole]), [0, 0])
        times, rank = gathered[:, :2], everyone.rank
        state.times.assign(
            tf.concat([times[:rank], [own], times[rank + 1 :]], 0)
        )
        if state.accelerator is not None:
            told = gathered[self.roles.workers[0], 2:]
            counter.assign(tf.cast(told[0], counter.dtype))
            streak.take(told[1:], step.gradient_paths())

    def _hand_over(
        self, state: RoleState, peers: Communicator, everyone: Communicator
    ) -> None:
        """At the end of an interval workers take over what was found."""
        geometry = state.layout.geometry
        ends = self.timing.ends(self.job.clock, state)
        ends &= tf.equal(state.progress, geometry.steps)

        def take_over() -> None:
            spectrum = None
            if state.accelerator is not None:
                estimation = Estimation(geometry, peers, self.seed)
                spectrum = state.accelerator.spectrum(estimation)
            found = hand_over(spectrum, state.layout, self.roles, everyone)
            if found is not None:
                adopt(state, *found, peers, self.job)
                if state.final_update is not None:
                    weights = flat_weights(self.job.model)
                    alpha = self._rate.at(self.job, state)
                    subspace = state.existing_subspace
                    move = state.final_update.move(
                        weights, subspace, tf.cast(alpha, weights.dtype), peers
                    )
                    add_to_weights(self.job.model, move)
            state.progress.assign(0)

        when(ends, take_over)

    def _send_weights(self, state: RoleState, everyone: Communicator) -> None:
        """Gives the accelerators the first worker's variables."""
        model = self.job.model
        variables = all_variables(model)
        values = [tf.cast(v.value, wire_type(v)) for v in variables]
        received = everyone.broadcast(
            values,
            [tf.TensorSpec(value.shape, value.dtype) for value in values],
            self.roles.workers[0],
            (self.roles.workers[0], *self.roles.accelerators),
        )
        if state.accelerator is not None and received is not None:
            for variable, value in zip(variables, received, strict=True):
                own = own_copy(variable.value)
                own.assign(tf.cast(value, own.dtype))

    # ----------------------------------------------------------- reporting
    @override
    def first(self, updates: int) -> str:
        """See `Estimator.first`: at the end of the first interval."""
        timing = self.timing
        end, interval = timing.warmup(self.states), timing.interval.get()
        if is_number(interval):
            end += int(interval)
            return f"the first after update {end:,}" if updates < end else ""
        begins = f"the first begins before update {end + 1:,}"
        return begins if updates <= end else ""

    @override
    def rows(self) -> list[tuple[str, str]]:
        waiting = ", ".join(f"{share:.0%}" for share in self.idle_share())
        if self.job.topology.hint == "nccl":
            waiting += " by the hosts' clocks, which may not see GPUs work"
        return [
            ("Workers", ", ".join(map(str, self.roles.workers))),
            ("Accelerators", ", ".join(map(str, self.roles.accelerators))),
            ("Time spent waiting", waiting),
        ]

    @override
    def idle_share(self) -> np.ndarray:
        if not self.states:
            return np.zeros(len(self.roles.workers))
        idle, whole = self.states[0].times.numpy().T
        return np.asarray(idle / np.maximum(whole, 1e-9))

    @override
    def beside_bytes(self, state: RoleState) -> dict[str, int]:
        basis = copies = 0
        if state.final_update is not None:
            copies = state.final_update.bytes
        if state.accelerator is not None:
            copies = state.layout.geometry.size * state.layout.item
            basis = state.accelerator.bytes - copies
            for one in self.states[:1]:  # of this replica
                assert one.accelerator is not None
                copies += one.accelerator.batch_bytes
        return {"basis": basis, "copies": copies}

    @override
    def traffic(self, layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
        rank = self.job.topology.local[0]
        plain, _ = super().traffic(layout)
        if not self.roles.trains(rank):
            plain = dict.fromkeys(plain, 0)
            plain["weights"] = sum(
                math.prod(v.shape) * wire_type(v).size
                for v in all_variables(self.job.model)
            )
            estimating = len(self.roles.accelerators)
            return plain, {
                "lanczos": estimation_bytes(layout.geometry, estimating)
            }
        carrying = Subspace.replace_bytes(layout, self.inner())
        pieces = piece_bytes(layout, self.roles, rank)
        estimation = {"directions": pieces + carrying}
        if self.final_update == "paper":
            plain["projections"] = 0
            estimation["projections"] = FinalUpdate.moving_bytes(layout)
        return plain, estimation
