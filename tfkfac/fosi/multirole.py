"""MR-DHO2: accelerators work out the curvature while workers train."""

import math

import keras
import numpy as np
import tensorflow as tf

from tfkfac.capture.forward import ForwardTap, find_call
from tfkfac.capture.loss_batch import LossBatch
from tfkfac.capture.trace import TraceStore, current_store, replica_id
from tfkfac.capture.walk import walk
from tfkfac.compat.graphs import in_graph, stamp_time, state_variable
from tfkfac.compat.inner_update import own_copy
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.shards import Shards
from tfkfac.fosi.accelerator import Accelerator
from tfkfac.fosi.directions import HybridOptimizer, HybridState
from tfkfac.fosi.estimation import Estimation, differentiable_sum
from tfkfac.fosi.handover import hand_over
from tfkfac.fosi.moments import synchronized_layers, tap_moments
from tfkfac.fosi.subspace import Subspace
from tfkfac.wrapper.hyperparameters import is_number
from tfkfac.wrapper.optimizer import Gradients
from tfkfac.wrapper.shares import batch_share


class MultiRoleState(HybridState):
    """The state of one replica of a job with accelerators.

    Attributes:
        accelerator: The iteration under way; None on workers.
        progress: Number of its iterations done; 0 when none is under way.
        gradient_sum: Sum of the gradients of an interval, for the published
            final update on workers.
        times: Idle and all seconds of each replica `(replicas, 2)`.
        arrived: When this replica last came to the meeting that ends a step.
        left: When it last left it.
    """

    def __init__(
        self,
        subspace: Subspace | None,
        accelerator: Accelerator | None,
        gradient_sum: tf.Variable | None,
        replicas: int,
    ) -> None:
        super().__init__(subspace)
        self.accelerator = accelerator
        self.gradient_sum = gradient_sum
        self.progress = state_variable(0, "int64", "progress")
        times = tf.zeros([replicas, 2])
        self.times = state_variable(times, "float64", "times")
        self.arrived = state_variable(0, "float64", "arrived")
        self.left = state_variable(0, "float64", "left")


class MultiRoleOptimizer(HybridOptimizer):
    """Divides the replicas into workers and accelerators (DHO2, section IV).

    In an interval the workers train among themselves. The accelerators do a
    Lanczos estimation at the interval's first weights, on their own part of
    the interval's first batch, a few iterations beside each step. At the end
    of the interval the workers take over its result.

    At the end of every step all replicas meet: the accelerators get the
    weights and all other variables of the model from the first worker, so that
    metrics, evaluation and saving are right on every replica.
    """

    _states: tuple[MultiRoleState, ...]
    final_update: str
    seed: int

    # --------------------------------------------------- binding and state
    def _attached(self) -> None:
        super()._attached()
        if self.accelerator_fraction == 0:
            return
        layers = [node.layer for node in walk(self.bound_model())]
        store = TraceStore()
        for layer in synchronized_layers(layers):
            tap_moments(layer, lambda x: self._moments_group(store, x))

    def _moments_group(self, store: TraceStore, value: tf.Tensor) -> tf.Tensor:
        """Sum of moments over the replicas of the same role."""
        key = (id(self), replica_id())
        groups = current_store(store)
        if key not in groups:
            everyone = self._communicator(f"{self._scope} moments")
            groups[key] = self._roles.peers(everyone)
        if not self._roles.trains(self._rank()):
            # Accelerators do no backward pass: nobody would answer in theirs.
            return value * len(self._roles.accelerators)
        return differentiable_sum(groups[key], value)

    def _new_state(self, rank: int) -> HybridState:
        roles = self._roles
        if not roles.accelerators:
            return super()._new_state(rank)
        geometry = self._geometry
        accelerator = gradient_sum = None
        if not roles.trains(rank):
            shards = Shards(geometry.size, len(roles.accelerators))
            accelerator = Accelerator(geometry, shards.length)
        elif self.final_update == "paper":
            zeros = tf.zeros([geometry.size])
            gradient_sum = state_variable(zeros, geometry.dtype, "gradient_sum")
        replicas = len(roles.workers) + len(roles.accelerators)
        subspace = self._new_subspace(rank)
        return MultiRoleState(subspace, accelerator, gradient_sum, replicas)

    # ------------------------------------------------------------ the step
    def _train(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        batch: LossBatch,
        communicator: Communicator,
    ) -> None:
        if not self._roles.accelerators:
            super()._train(gradients, variables, batch, communicator)
            return
        state = self._states[self._position()]
        peers = self._roles.peers(communicator)
        begins, target = self._schedule(state)
        if self._roles.trains(communicator.rank):
            super()._train(gradients, variables, batch, peers)
        else:
            self._accelerate(state, batch, peers, begins, target)
        state.progress.assign(target)
        self._meet(state, communicator)
        communicator.outputs()  # what was gathered is always used
        self._hand_over(state, peers, communicator)
        self._send_weights(state, communicator)

    def _schedule(self, state: MultiRoleState) -> tuple[tf.Tensor, tf.Tensor]:
        """What is to be done of the estimation beside this step.

        The iterations are spread evenly over the interval. Every replica
        keeps the same count of them.

        Returns:
            Whether an estimation begins, and the iterations to have done.
        """
        clock, interval = self._clock(), self._value("update_interval")
        idle = tf.equal(state.progress, 0)
        begins = self._due(state) & idle
        state.last.assign(tf.where(begins, clock, state.last))
        steps = tf.constant(self._geometry.steps, tf.int64)
        elapsed = clock - state.last + 1
        target = tf.minimum(-(-steps * elapsed // interval), steps)
        target = tf.where(begins | ~idle, target, 0)
        most = state.progress + self._most_iterations()
        return begins, tf.clip_by_value(target, state.progress, most)

    def _most_iterations(self) -> int:
        """Largest number of iterations beside one step."""
        interval = self._hyperparameters["update_interval"].get()
        if not is_number(interval):
            return self._geometry.steps
        return math.ceil(self._geometry.steps / interval)

    def _accelerate(
        self,
        state: MultiRoleState,
        batch: LossBatch,
        group: Communicator,
        begins: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """An accelerator's part of a step: some Lanczos iterations."""
        model, accelerator = self.bound_model(), state.accelerator
        assert accelerator is not None
        call = find_call(model, batch, ForwardTap.open(model).take())
        estimation = Estimation(self._geometry, group, self.seed)
        weights = model.trainable_variables

        def begin() -> tf.Tensor:
            share = batch_share(batch, group, self._topology.workers)
            accelerator.begin(batch, call, weights, share, estimation)
            with tf.control_dependencies(group.outputs()):
                return tf.constant(0)

        def advance() -> tf.Tensor:
            accelerator.advance(
                model,
                batch,
                call,
                estimation,
                tf.convert_to_tensor(state.progress),
                target,
                self._most_iterations(),
            )
            with tf.control_dependencies(group.outputs()):
                return tf.constant(0)

        tf.cond(begins, in_graph(begin), lambda: tf.constant(0))
        due = target > state.progress
        tf.cond(due, in_graph(advance), lambda: tf.constant(0))

    def _meet(self, state: MultiRoleState, everyone: Communicator) -> None:
        """Waits for all; accelerators learn the number of updates."""
        counter = own_copy(self.inner_optimizer._iterations.value)
        done = [tf.identity(counter)]
        if state.accelerator is not None:
            done.append(tf.identity(state.accelerator.diagonal))
        before = tf.identity(state.left)
        with tf.control_dependencies([*done, before]):
            arrived = stamp_time(state.arrived)
        own = state.times[everyone.rank]
        with tf.control_dependencies([arrived]):
            count = tf.cast(counter, tf.float64)
        gathered = everyone.all_gather(tf.concat([[count], own], 0))
        with tf.control_dependencies([gathered]):
            left = stamp_time(state.left)
        idle, whole = left - arrived, left - before
        own += tf.where(before > 0, tf.stack([idle, whole]), [0, 0])
        times = gathered[:, 1:]
        rank = everyone.rank
        state.times.assign(
            tf.concat([times[:rank], [own], times[rank + 1 :]], 0)
        )
        if state.accelerator is not None:
            counter.assign(tf.cast(gathered[0, 0], counter.dtype))

    def _hand_over(
        self,
        state: MultiRoleState,
        peers: Communicator,
        everyone: Communicator,
    ) -> None:
        """At the end of an interval workers take over what was found."""
        clock = self._clock()
        since = clock - self.warmup_steps
        ends = tf.equal(since % self._value("update_interval"), 0)
        ends &= tf.not_equal(clock, state.last)
        ends &= tf.equal(state.progress, self._geometry.steps)

        def take() -> tf.Tensor:
            spectrum = None
            if state.accelerator is not None:
                estimation = Estimation(self._geometry, peers, self.seed)
                spectrum = state.accelerator.spectrum(estimation)
            found = hand_over(spectrum, self._layout(), self._roles, everyone)
            if found is not None:
                self._take(state, *found, peers)
                self._final_update(state, peers)
            outputs = everyone.outputs() + peers.outputs()
            with tf.control_dependencies(outputs):
                return state.progress.assign(0)

        tf.cond(ends, take, lambda: tf.convert_to_tensor(state.progress))

    def _final_update(self, state: MultiRoleState, group: Communicator) -> None:
        """A Newton step with the interval's gradients, as published (eq. 17).

        Without the second projection there, which changes nothing.
        """
        if state.gradient_sum is None or state.subspace is None:
            return
        subspace = state.subspace
        total = tf.convert_to_tensor(state.gradient_sum)
        inside = subspace.coefficients(total, group)
        alpha = tf.cast(self._value("alpha"), total.dtype)
        newton = alpha * inside * subspace.inverse_curvature(group.rank)
        self._add_to_weights(-subspace.combine([newton], group))
        state.gradient_sum.assign(tf.zeros_like(total))

    def _send_weights(
        self, state: MultiRoleState, everyone: Communicator
    ) -> None:
        """Gives the accelerators the first worker's variables."""
        model = self.bound_model()
        variables = sorted(
            [*model.trainable_variables, *model.non_trainable_variables],
            key=lambda v: str(wire_type(v)),
        )
        values = [tf.cast(v.value, wire_type(v)) for v in variables]
        received = everyone.broadcast(
            values,
            [tf.TensorSpec(value.shape, value.dtype) for value in values],
            self._roles.workers[0],
            (self._roles.workers[0], *self._roles.accelerators),
        )
        if state.accelerator is not None and received is not None:
            for variable, value in zip(variables, received, strict=True):
                own = own_copy(variable.value)
                own.assign(tf.cast(value, own.dtype))
        with tf.control_dependencies(everyone.outputs()):
            state.left.assign_add(0)

    # ----------------------------------------------------------- reporting
    def idle_share(self) -> np.ndarray:
        """See `HybridOptimizer.idle_share`."""
        if not self.built or not self._roles.accelerators:
            return super().idle_share()
        idle, whole = self._states[0].times.numpy().T
        return idle / np.maximum(whole, 1e-9)


def wire_type(variable: keras.Variable) -> tf.DType:
    """The dtype in which a variable travels; not all have a collective."""
    dtype = tf.as_dtype(variable.dtype)
    if dtype.is_floating:
        return dtype
    return tf.int64
