"""A training job, common to all of its steps, and its log of losses."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import replica_id
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.strategies import keep_apart, side_by_side
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import find_topology
from tfkfac.loss.batch import LossBatch
from tfkfac.loss.recognition import Verdict
from tfkfac.loss.shares import LossScaling
from tfkfac.loss.terms import LossTerms, mean_over
from tfkfac.training.guards import Streak, count_events


class _Log(NamedTuple):
    """Counts of one loss on one replica.

    Attributes:
        loss: Name of the loss.
        names: The likelihoods that it could be of.
        counts: Number of steps in which it was each of them.
        unknown: Number of steps in which it was none.
        unit: Its unit in the last step.
    """

    loss: str
    names: tuple[str, ...]
    counts: tf.Variable
    unknown: tf.Variable
    unit: tf.Variable


class LossLog:
    """Log of the likelihoods that losses of the user's own have been."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, int, tuple[str, ...]], _Log] = {}

    def note(
        self,
        losses: tuple[LossTerms, ...],
        rank: int,
        device: str | None,
        optimizer: str,
        instead: str,
    ) -> None:
        """Notes a step.

        Args:
            losses: The terms of its losses, with verdicts.
            rank: The replica.
            device: Its device.
            optimizer: Name of the optimizer.
            instead: What is done with a loss that is no likelihood.
        """
        for place, loss in enumerate(losses):
            if loss.verdict is None or loss.call is None:
                continue
            key = rank, place, loss.verdict.names
            if key not in self._logs:
                with tf.init_scope(), tf.device(device):
                    self._logs[key] = _new_log(loss.call.loss.name, key[2])
            _note(self._logs[key], loss.verdict, optimizer, instead)

    def lines(self) -> list[str]:
        """Lines for `summary`."""
        return [_text(log) for log in self._of_first()]

    def events(self) -> list[tuple[str, tf.Variable]]:
        """Steps in which a loss was of no likelihood."""
        return [
            (
                f"steps whose loss '{log.loss}' was a multiple of no "
                "likelihood",
                log.unknown,
            )
            for log in self._of_first()
        ]

    def _of_first(self) -> list[_Log]:
        """Logs of the first replica of this process."""
        first = min((rank for rank, *_ in self._logs), default=0)
        return [log for (rank, *_), log in self._logs.items() if rank == first]


def _new_log(loss: str, names: tuple[str, ...]) -> _Log:
    return _Log(
        loss,
        names,
        state_variable([0] * len(names), "int64", "likelihoods"),
        state_variable(0, "int64", "no_likelihood"),
        state_variable(1.0, "float64", "unit"),
    )


def _note(log: _Log, verdict: Verdict, optimizer: str, instead: str) -> None:
    counted = tf.cast(verdict.is_counted, tf.int64)
    which = tf.one_hot(verdict.index, len(log.names), dtype=tf.int64)
    log.counts.assign_add(which * counted)
    log.unit.assign(verdict.unit)
    count_events(
        [verdict.is_counted & ~verdict.is_known],
        [log.unknown],
        [optimizer],
        f"loss '{log.loss}' is a multiple of no likelihood in this step: "
        f"{instead}. `tfkfac.register_distribution` declares the distribution "
        "of a loss.",
    )


def _text(log: _Log) -> str:
    """One line on a loss."""
    counts = zip(log.names, log.counts.numpy(), strict=True)
    parts = [f"{name} in {n:,} steps" for name, n in counts if n]
    if unknown := int(log.unknown.numpy()):
        parts.append(f"no likelihood in {unknown:,} steps")
    known = ", ".join(parts) or "no step yet"
    return (
        f"Loss '{log.loss}' is taken for: {known}; unit "
        f"{float(log.unit.numpy()):.4g} in the last."
    )


T = TypeVar("T")

_ordinals = itertools.count()


class Job:
    """Common to all steps: model, replicas, inner optimizer, clock.

    Args:
        name: Name of the optimizer.
        model: The model that is trained.
        inner_optimizer: The inner optimizer.
        scaling: Scale of the loss; None is a loss without.

    Attributes:
        topology: The replicas of the job, and which of them live here.
        skipped: For each of those, the number of steps it has skipped.
        streaks: For each, those of them that came last.
        empty: And of its last batches that had no examples, if it has peers.
        loss_terms: Number of terms of a loss that nobody sees being computed,
            or a function that returns it.
        losses: What the losses have been taken for.
    """

    def __init__(
        self,
        name: str,
        model: keras.Model,
        inner_optimizer: keras.optimizers.Optimizer,
        scaling: LossScaling | None = None,
    ) -> None:
        self.name = name
        self.inner_optimizer = inner_optimizer
        self.scaling = LossScaling(name) if scaling is None else scaling
        self.loss_terms: int | Callable[[], tf.Tensor] | None = None
        self.losses = LossLog()
        self.topology = find_topology(model.distribute_strategy)
        self.skipped: tuple[tf.Variable, ...] = ()
        self.streaks: tuple[Streak, ...] = ()
        self.empty: tuple[tf.Variable, ...] = ()
        self._model = weakref.ref(model)
        self._tokens: tuple[tf.Variable, ...] = ()
        self._scope = ""

    def find_model(self) -> keras.Model | None:
        """The model, or None if it has been deleted."""
        return self._model()

    @property
    def model(self) -> keras.Model:
        """The model, which is still there."""
        model = self._model()
        assert model is not None
        return model

    @property
    def clock(self) -> tf.Tensor:
        """Number of updates of the weights so far, int64."""
        return tf.cast(self.inner_optimizer.iterations, tf.int64)

    @property
    def rank(self) -> int:
        """The replica whose code is being traced or run."""
        local = self.topology.local
        return local[0] if len(local) == 1 else replica_id()

    def terms_of(self, batch: LossBatch) -> tuple[LossTerms, ...]:
        """The terms of the losses of a batch; none if they are not known."""
        if batch.terms or self.loss_terms is None:
            return batch.terms
        known = self.loss_terms
        return (mean_over(known() if callable(known) else known),)

    def create(self) -> None:
        """Creates what every step needs, whatever the method."""
        self.skipped = self.for_each(
            lambda rank: state_variable(0, "int64", "skipped_steps")
        )
        self.streaks = self.for_each(lambda rank: Streak())
        if self.topology.replicas > 1:
            self.empty = self.for_each(
                lambda rank: state_variable(0, "int64", "empty_batches")
            )
            self._tokens = self.for_each(
                lambda rank: state_variable(0.0, "float32", "ordering_token")
            )
            # Tells the collectives of one optimizer from another's. All
            # workers build the optimizers of a job, in the same order.
            self._scope = f"{self.name}:{next(_ordinals)}"

    def for_each(self, make: Callable[[int], T]) -> tuple[T, ...]:
        """Makes the state of every replica of this process, by its rank.

        It is a replica's own: not mirrored, on its device, and other replicas
        may have one of another shape or none.
        """
        made = []
        local = zip(self.topology.local, self.topology.devices, strict=True)
        for rank, device in local:
            with tf.init_scope(), tf.device(device):
                made.append(make(rank))
        return tuple(made)

    def own(self, states: Sequence[T]) -> T:
        """The state of this replica, of what `for_each` returned."""
        return self.at(states, self.rank)

    def at(self, states: Sequence[T], rank: int) -> T:
        """The state of a replica of this process, of the same."""
        return states[self.topology.local.index(rank)]

    def group(self, purpose: str = "") -> Communicator:
        """This replica's collectives in one trace, with all others.

        Args:
            purpose: What tells them from those of the step, if they are made
                in another order.
        """
        topology = self.topology
        if len(topology.local) > 1:
            keep_apart(topology.devices)
        return Communicator(
            self.rank,
            topology.replicas,
            f"{self._scope} {purpose}".strip(),
            topology.hint,
            len(topology.local) > 1,
            self.own(self._tokens) if self._tokens else None,
        )

    def together(self, do: Callable[[], T]) -> T:
        """Does what has collectives, with all replicas of this process.

        In a graph, and with one replica a process, there is nothing to it.

        Args:
            do: What is done.

        Returns:
            What it returns.
        """
        if len(self.topology.local) > 1 and tf.executing_eagerly():
            return side_by_side(do, self.own(self.topology.devices))
        return do()

    def among_processes(self, purpose: str) -> Communicator:
        """Collectives of this process with the others, outside of graphs.

        Args:
            purpose: What tells them from others.
        """
        topology = self.topology
        scope = f"{self._scope} {purpose}"
        return Communicator(topology.process, topology.processes, scope)
