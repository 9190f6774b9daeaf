"""One training step of one replica."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import Values, put_back
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import of_this_graph
from tfkfac.compat.optimizers import (
    apply_or_count,
    knows_variable,
    updates_in_replica,
    variable_key,
)
from tfkfac.distributed.collectives import Communicator
from tfkfac.linalg.tensors import all_finite, are_finite
from tfkfac.loss.batch import LossBatch, LossTap
from tfkfac.loss.shares import LossMeasure, measure_loss, weigh, weighted
from tfkfac.training.guards import Streak, count_each, note_batch
from tfkfac.training.job import Job

Gradients = list[tf.Tensor | None]


class Update(NamedTuple):
    """Task of the inner optimizer in a step.

    Attributes:
        gradients: The gradients for it.
        after: Called where the inner optimizer has changed the weights, before
            it averages or constrains them.
    """

    gradients: Gradients
    after: Callable[[], None] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Step:
    """One training step of one replica, in one trace.

    Attributes:
        job: The job.
        gradients: Gradients of this replica's loss, which Keras has divided
            by the number of replicas; None where there is none.
        variables: Their variables.
        batch: The batch of this replica.
        group: The replicas that train together.
        before: What the model kept before it was called.
        finite: Scalar bool, true if it can be done; set by `check_finite`.
    """

    job: Job
    gradients: Gradients
    variables: Sequence[keras.Variable]
    batch: LossBatch
    group: Communicator
    before: Values = dataclasses.field(default_factory=list)
    finite: tf.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.gradients = list(self.gradients)
        self.variables = list(self.variables)
        self._is_reduced = self.group.size == 1
        self._measure = self.batch.measure
        self._bounds: list[tf.Tensor] = []
        self._withheld: list[int] = []

    def among(self, members: tuple[int, ...]) -> "Step":
        """The step of a part of the group, with this replica."""
        return dataclasses.replace(self, group=self.group.among(members))

    @property
    def loss(self) -> LossMeasure:
        """Measure of the loss among the replicas of the group.

        It is worked out where it is first asked for. That is in `reduce` or
        `weigh`, which every replica that trains calls outside of any branch.
        """
        # Not a `cached_property`: before Python 3.12 its lock is common to
        # all instances, and replicas that are threads wait for each other.
        if self._measure is None:
            self._measure = measure_loss(
                self.job.terms_of(self.batch),
                self.group,
                self.job.topology.replicas,
                is_weighed=False,
            )
        return self._measure

    def own_loss(self) -> tf.Tensor:
        """This replica's part of the mean loss, float64.

        It is 0 where nobody sees the loss.
        """
        value = self.batch.value
        if value is None:
            return tf.zeros([], tf.float64)
        return weighted(tf.cast(value, tf.float64), self.loss.share)

    def row_scale(self) -> tf.Tensor:
        """Factor for recorded gradients, see `LossMeasure`."""
        own, scale = self.loss.row_scale, self.job.scaling.factor()
        return own if scale is None else own / tf.cast(scale, own.dtype)

    def note_losses(self, instead: str) -> None:
        """Counts what the losses are taken for in this step.

        The words `instead` say what is done with a loss that is no likelihood.
        """
        self.job.losses.note(self.loss.losses, self.job, instead)

    def withhold(self, indices: Sequence[int], bound: tf.Tensor) -> None:
        """Keeps gradients out of everything, so that nobody computes them.

        Their places, the indices, are empty until a method puts something
        there. The bound is a scalar, not finite if one of them is not.
        """
        for i in indices:
            self.gradients[i] = None
        self._bounds.append(bound)
        self._withheld.append(indices[0])

    @property
    def share(self) -> tf.Tensor | None:
        """Factor for this replica's gradients; None is 1.

        With batches of different sizes, the last of an epoch, the mean of the
        replicas' gradients is not that of the global mean. Where the loss has
        been weighed before the gradients were taken, they are already.
        """
        return None if self.batch.measure is not None else self.loss.share

    def weigh(self) -> None:
        """Makes the gradients this replica's part of that of the mean loss."""
        share = self.share
        if self.group.size == 1 and share is None:
            return
        self._bounds = [weighted(bound, share) for bound in self._bounds]
        # The static shape of a gradient may be lost where the batch is open.
        self.gradients = [
            None
            if g is None
            else weighted(
                tf.ensure_shape(tf.convert_to_tensor(g), v.shape), share
            )
            for g, v in zip(self.gradients, self.variables, strict=True)
        ]

    def reduce(self, *beside: tf.Tensor) -> list[tf.Tensor]:
        """Makes the gradients those of the mean loss of the whole group.

        The only reduction of the gradients, whatever the inner optimizer. It
        returns the sums of other tensors, which go in the same messages.
        """
        self.weigh()
        sums = list(beside)
        if self.group.size > 1:
            # The last layers first: the backward pass begins with them.
            present = [g for g in self.gradients[::-1] if g is not None]
            parts = [present, self._bounds, sums]
            reduced = iter(self.group.all_reduce(list(chain(*parts))))
            rest, self._bounds, sums = (
                [next(reduced) for _ in part] for part in parts
            )
            self.gradients = [
                None if g is None else rest.pop() for g in self.gradients
            ]
        self._is_reduced = True
        return sums

    def check_finite(self) -> None:
        """Finds out whether the step can be done.

        One that cannot is counted, and leaves no trace in the model.
        """
        flags, streak = self._finite_flags(), self._streak
        self.finite = tf.reduce_all(flags)
        skipped = ~self.finite
        count_each(
            skipped,
            self.job.own(self.job.skipped),
            [self.job.name],
            "a step is skipped, its gradients are not finite.",
        )

        def skip() -> None:
            streak.extend(flags, self._is_lost())
            put_back(self.before)

        when(skipped, skip)

    def apply(self, direction: Callable[[], Update]) -> None:
        """Lets the inner optimizer take the step if it is finite.

        `direction` then runs on every replica of the group, else on none.
        Collectives are legal in it; what it needs of the batch and of the
        layers' records must be taken before.
        """

        def update() -> None:
            self._apply_inner(direction())
            self._streak.end()

        when(self.finite, update)

    def keep_finite(self, losses: tf.Tensor) -> None:
        """Restore moving statistics that are not finite after a micro-batch.

        If its loss or the sum of the `losses` of the micro-batches before it
        in the same step is not finite, it is left out of the metrics.
        """
        lost = is_lost(self.batch.value, losses)
        self._streak.left_out.assign(tf.cast(lost, tf.int64))
        statistics = [
            tf.convert_to_tensor(v)
            for v, _ in self.before
            if v.dtype.is_floating
        ]
        if statistics:
            when(~all_finite(statistics), lambda: put_back(self.before))

    def _is_lost(self) -> tf.Tensor:
        """True if the loss of a replica of the group is not finite.

        All replicas of the group must call this, or none.
        """
        lost = is_lost(self.batch.value)
        if self.batch.value is None or self.group.size == 1:
            return lost
        (total,) = self.group.all_reduce([tf.cast(lost, tf.float32)])
        return total > 0

    @property
    def _streak(self) -> Streak:
        """The steps that this replica has skipped last."""
        return self.job.own(self.job.streaks)

    def gradient_paths(self) -> list[str]:
        """The weights whose gradients must be finite."""
        present = [i for i, g in enumerate(self.gradients) if g is not None]
        return [self.variables[i].path for i in [*present, *self._withheld]]

    def _finite_flags(self) -> tf.Tensor:
        """True for each gradient that is finite; the same on every replica."""
        values = [
            g.values if isinstance(g, tf.IndexedSlices) else g
            for g in self.gradients
            if g is not None
        ]
        self._streak.names = tuple(self.gradient_paths())
        finite = are_finite([*values, *self._bounds])
        if self._is_reduced:
            return finite
        bad = tf.cast(~finite, tf.float32)
        (total,) = self.group.all_reduce([bad])
        return tf.equal(total, 0)

    def _apply_inner(self, update: Update) -> None:
        """The steps of inner and rest optimizer, without a second reduction."""
        inner, rest = self.job.inner_optimizer, self.job.rest_optimizer
        # What is passed on as it is must be of this branch's graph too.
        pairs = [
            (None if g is None else of_this_graph(g), v)
            for g, v in zip(update.gradients, self.variables, strict=True)
        ]
        tasks: list[Any] = [(inner, pairs, update.after)]
        if rest is not None:
            others = [one for one in pairs if knows_variable(rest, one[1])]
            own = [one for one in pairs if not knows_variable(rest, one[1])]
            tasks = [(rest, others, None), (inner, own, update.after)]
        # First the one whose rate may follow the other's, which counts steps.
        if self.job.inner_follows:
            tasks.reverse()
        for optimizer, own, after in tasks:
            with updates_in_replica(optimizer, after):
                apply_or_count(optimizer, own)


def is_lost(loss: tf.Tensor | None, *others: tf.Tensor) -> tf.Tensor:
    """True if one of several losses is not finite, or the first is unknown."""
    if loss is None:
        return tf.constant(True)
    finite = [tf.reduce_all(tf.math.is_finite(x)) for x in (loss, *others)]
    return ~tf.reduce_all(finite)


def weigh_loss(loss: tf.Tensor, job: Job, peers: tuple[int, ...]) -> tf.Tensor:
    """Weighs a replica's loss by its share of the terms, see `LossMeasure`.

    Under the tape, so that what flows back through synchronised layers to
    other replicas has the right weight too. The step knows of it by the batch.
    The peers are the replicas that share the mean with this one.
    """
    tap = LossTap.open(job.model)
    batch = tap.take_last(LossBatch())
    if not batch.terms or batch.measure is not None:
        return loss
    note_batch(batch.terms, job.own(job.empty), job.rank)
    group = job.group(f"loss {batch.ordinal}").among(peers)
    measure = measure_loss(batch.terms, group, job.topology.replicas, True)
    tap.note(dataclasses.replace(batch, measure=measure))
    return weigh(loss, batch.terms, measure.shares)


def places_of(step: Step, weights: Sequence[keras.Variable]) -> list[int]:
    """For each gradient there is, its variable's place among the weights."""
    inner = step.job.inner_optimizer
    position = {variable_key(inner, v): i for i, v in enumerate(weights)}
    return [
        position[variable_key(inner, v)]
        for v, g in zip(step.variables, step.gradients, strict=True)
        if g is not None
    ]
