"""Training step of a replica: gradients, reduction and update."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import Values, restore
from tfkfac.compat.functions import when
from tfkfac.compat.optimizers import (
    knows_variable,
    merge_rows,
    raw_iterations,
    updates_in_replica,
    variable_key,
)
from tfkfac.distributed.collectives import Communicator
from tfkfac.linalg.tensors import all_finite, are_finite
from tfkfac.loss.batch import LossBatch, LossTap
from tfkfac.loss.shares import LossMeasure, measure_loss, weigh, weighted
from tfkfac.loss.targets import least_loss
from tfkfac.training.guards import Streak, count_each, count_empty_batches
from tfkfac.training.job import Job

Gradients = list[tf.Tensor | None]
# Increments `factor w + offset` of weights w: (due, factor, offset) by index.
Changes = dict[int, tuple[tf.Tensor, tf.Tensor, tf.Tensor]]


class Update(NamedTuple):
    """Input of the inner optimizer in a step.

    `after` is called after the inner optimizer has changed the weights, before
    it averages or constrains them.
    """

    gradients: Gradients
    after: Callable[[], None] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Step:
    """Training step of a replica, in one trace."""

    job: Job
    # Gradients of this replica's loss, divided by the number of replicas by
    # Keras; None for a variable without a gradient.
    gradients: Gradients
    variables: Sequence[keras.Variable]  # the variables of the gradients
    batch: LossBatch
    group: Communicator  # the replicas that train together
    # Values of the model's non-trainable state before its call.
    before: Values = dataclasses.field(default_factory=list)
    # Scalar bool, False to skip the step; set by `check_finite`.
    finite: tf.Tensor = dataclasses.field(init=False)
    # Factor by which `multiply_unit` changed the unit.
    unit_factor: tf.Tensor | None = dataclasses.field(init=False, default=None)
    # Increments by index of the weight; those that are due replace the step.
    output_changes: Changes = dataclasses.field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.gradients = list(self.gradients)
        self.variables = list(self.variables)
        self._is_reduced = self.group.size == 1
        self._measure = self.batch.measure
        self._bounds: list[tf.Tensor] = []
        self._dropped: list[int] = []

    def among(self, members: tuple[int, ...]) -> "Step":
        """Return a copy of the step for a subgroup with this replica."""
        return dataclasses.replace(self, group=self.group.among(members))

    @property
    def loss(self) -> LossMeasure:
        """Number of terms, unit and weights of the loss over the group.

        The first access, in `reduce` or `weigh`, runs collectives: every
        training replica calls these methods outside of branches.
        """
        # No `cached_property`: before Python 3.12 all instances share its
        # lock, and replicas that are threads would deadlock.
        if self._measure is None:
            self._measure = measure_loss(
                self.job.terms_of(self.batch),
                self.group,
                self.job.topology.replicas,
                is_weighed=False,
            )
        return self._measure

    def weighted_loss(self) -> tf.Tensor:
        """Return this replica's term of the mean loss; 0 if not known."""
        value = self.batch.value
        if value is None:
            return tf.zeros([], tf.float64)
        return weighted(tf.cast(value, tf.float64), self.loss.share)

    def weighted_excess(self) -> tf.Tensor:
        """Return the loss minus its minimum over all predictions.

        Without compiled losses, it is `weighted_loss`. Otherwise penalties and
        losses added by layers do not count.
        """
        excess, value = self.batch.excess, self.batch.value
        if excess is None:
            if value is None:
                return tf.zeros([], tf.float64)
            values = [x.weighted_value for x in self.loss.losses]
            present = [tf.reduce_sum(x) for x in values if x is not None]
            sums = [tf.cast(x, tf.float64) for x in present or [value]]
            replicas = self.job.topology.replicas
            excess = tf.add_n(sums) - least_loss(self.loss.losses, replicas)
        return weighted(excess, self.loss.share)

    def multiply_unit(self, factor: tf.Tensor) -> None:
        """Multiply the unit of the loss by a factor."""
        self.unit_factor = factor
        self._measure = self.loss._replace(unit=self.loss.unit * factor)

    def drop_gradients(self, indices: Sequence[int], bound: tf.Tensor) -> None:
        """Set gradients to None, so that TensorFlow prunes their computation.

        `bound` is a scalar that is not finite if any dropped gradient is not.
        """
        for i in indices:
            self.gradients[i] = None
        self._bounds.append(bound)
        self._dropped.append(indices[0])

    @property
    def share(self) -> tf.Tensor | None:
        """Weight of this replica's gradients in the mean; None is 1.

        Replicas with batches of different sizes (at the end of an epoch) have
        different weights. None if `weigh_loss` has already weighed the loss.
        """
        return None if self.batch.measure is not None else self.loss.share

    def weigh(self) -> None:
        """Weigh the gradients by this replica's share of the mean loss."""
        share = self.share
        if self.group.size == 1 and share is None:
            return
        self._bounds = [weighted(bound, share) for bound in self._bounds]
        # Restore static shapes, which a batch of unknown size may lose.
        self.gradients = [
            None
            if g is None
            else weighted(
                tf.ensure_shape(tf.convert_to_tensor(g), v.shape), share
            )
            for g, v in zip(self.gradients, self.variables, strict=True)
        ]

    def reduce(self, *extra: tf.Tensor) -> list[tf.Tensor]:
        """All-reduce the gradients to the gradients of the group's mean loss.

        Returns the sums of the `extra` tensors, which are sent in the same
        messages.
        """
        self.weigh()
        sums = list(extra)
        if self.group.size > 1:
            # Send the last layers first, in the order of the backward pass.
            present = [g for g in self.gradients[::-1] if g is not None]
            lists = [present, self._bounds, sums]
            reduced = iter(self.group.all_reduce(list(chain(*lists))))
            gradients, self._bounds, sums = (
                [next(reduced) for _ in tensors] for tensors in lists
            )
            self.gradients = [
                None if g is None else gradients.pop() for g in self.gradients
            ]
        self._is_reduced = True
        return sums

    def check_finite(self) -> None:
        """Set `finite`; if False, count the step and restore the model."""
        values = [
            g.values if isinstance(g, tf.IndexedSlices) else g
            for g in self.gradients
            if g is not None
        ]
        streak, group = self._streak, self.group
        streak.names = tuple(self.gradient_paths())
        # A bool per gradient, equal on all replicas.
        flags = are_finite([*values, *self._bounds])
        if not self._is_reduced:
            (bad,) = group.all_reduce([tf.cast(~flags, tf.float32)])
            flags = tf.equal(bad, 0)
        self.finite = tf.reduce_all(flags)
        skipped = ~self.finite
        count_each(
            skipped,
            self.job.local_state(self.job.skipped),
            [self.job.name],
            "a step is skipped, its gradients are not finite.",
        )

        def skip() -> None:
            lost = is_lost(self.batch.value)
            if self.batch.value is not None and group.size > 1:
                # The metrics exclude the batch if any replica has lost it.
                (total,) = group.all_reduce([tf.cast(lost, tf.float32)])
                lost = total > 0
            streak.extend(flags, lost)
            restore(self.before)

        when(skipped, skip)

    def apply(self, direction: Callable[[], Update]) -> None:
        """Apply the inner optimizer to `direction()` if the step is finite.

        `direction` runs on all replicas of the group or on none, so it may use
        collectives. Records of the batch and of layers must be read before,
        outside of this branch.
        """

        def update() -> None:
            inner, rest = self.job.inner_optimizer, self.job.rest_optimizer
            gradients, after = direction()
            pairs = list(zip(gradients, self.variables, strict=True))
            tasks: list[Any] = [(inner, pairs, after)]
            if rest is not None:
                uncovered = [p for p in pairs if knows_variable(rest, p[1])]
                covered = [p for p in pairs if not knows_variable(rest, p[1])]
                # The learning rate of the rest optimizer may follow the rate
                # of the inner optimizer: use the rate before the step is
                # counted.
                tasks = [(rest, uncovered, None), (inner, covered, after)]
            for optimizer, optimizer_pairs, callback in tasks:
                with updates_in_replica(optimizer, callback):
                    if all(g is None for g, _ in optimizer_pairs):
                        raw_iterations(optimizer).assign_add(1)
                        continue
                    grads, variables = zip(*optimizer_pairs, strict=True)
                    optimizer.apply([merge_rows(g) for g in grads], variables)
            self._streak.end()

        when(self.finite, update)

    def keep_finite(self, losses: tf.Tensor) -> None:
        """Restore moving statistics that are not finite after a micro-batch.

        The metrics exclude the micro-batch if its loss, or the sum `losses`
        over earlier micro-batches of the step, is not finite.
        """
        lost = is_lost(self.batch.value, losses)
        self._streak.excluded.assign(tf.cast(lost, tf.int64))
        statistics = [
            tf.convert_to_tensor(v)
            for v, _ in self.before
            if v.dtype.is_floating
        ]
        if statistics:
            when(~all_finite(statistics), lambda: restore(self.before))

    @property
    def _streak(self) -> Streak:
        """Consecutive skipped steps of this replica."""
        return self.job.local_state(self.job.streaks)

    def gradient_paths(self) -> list[str]:
        """Paths of the weights whose gradients are checked."""
        present = [i for i, g in enumerate(self.gradients) if g is not None]
        return [self.variables[i].path for i in [*present, *self._dropped]]


def is_lost(loss: tf.Tensor | None, *others: tf.Tensor) -> tf.Tensor:
    """True if any loss is not finite, or `loss` is None (not observed)."""
    if loss is None:
        return tf.constant(True)
    finite = [tf.reduce_all(tf.math.is_finite(x)) for x in (loss, *others)]
    return ~tf.reduce_all(finite)


def weigh_loss(loss: tf.Tensor, job: Job, peers: tuple[int, ...]) -> tf.Tensor:
    """Weigh a replica's loss by its share of the terms, see `LossMeasure`.

    Call it under the tape: gradients that flow to other replicas through
    synchronised layers then have the correct weight too. `peers` are the
    replicas of the mean.
    """
    tap = LossTap.open(job.model)
    batch = tap.pop_last(LossBatch())
    if not batch.terms or batch.measure is not None:
        return loss
    count_empty_batches(batch.terms, job.local_state(job.empty), job.rank)
    group = job.group(f"loss {batch.ordinal}").among(peers)
    measure = measure_loss(batch.terms, group, job.topology.replicas, True)
    tap.record(dataclasses.replace(batch, measure=measure))
    return weigh(loss, batch.terms, measure.shares)


def indices_in(step: Step, weights: Sequence[keras.Variable]) -> list[int]:
    """Return the index in `weights` of each variable that has a gradient."""
    inner = step.job.inner_optimizer
    position = {variable_key(inner, v): i for i, v in enumerate(weights)}
    return [
        position[variable_key(inner, v)]
        for v, g in zip(step.variables, step.gradients, strict=True)
        if g is not None
    ]
