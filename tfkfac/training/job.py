"""Training job: model, optimizers, replicas."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import replica_id
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.strategies import order_by_replica
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import find_topology
from tfkfac.loss.batch import LossBatch
from tfkfac.loss.shares import LossScaling
from tfkfac.loss.terms import LossTerms, mean_over
from tfkfac.training.fit_decay import RunPlan
from tfkfac.training.guards import Streak


def refuse_eager_replicas() -> NoReturn:
    """Refuse a process that runs several replicas without a graph.

    An eager `MirroredStrategy` runs one replica after the other, so a
    collective of the first replica would wait forever for the second.
    """
    raise ValueError(
        "Argument `run_eagerly` of `compile` must be False, and a training "
        "step of your own a `tf.function`, where a process has several "
        "replicas: TensorFlow runs eager replicas one after the other. To "
        "debug eagerly, use one replica in each process. Received: an "
        "eager step of several replicas"
    )


T = TypeVar("T")

_optimizer_numbers = itertools.count()


class Job:
    """Model, optimizers, replicas and counters, common to all training steps.

    Attributes:
        empty: Number of consecutive batches without an example, of each local
            replica; empty if there is one replica.
        loss_terms: Number of terms of a loss that is not computed by
            `compute_loss`, or a function that returns it.
    """

    def __init__(
        self,
        name: str,
        model: keras.Model,
        inner_optimizer: keras.optimizers.Optimizer,
        scaling: LossScaling | None = None,
        rest_optimizer: keras.optimizers.Optimizer | None = None,
        plan: RunPlan | None = None,
    ) -> None:
        self.name = name
        self.inner_optimizer = inner_optimizer
        self.rest_optimizer = rest_optimizer
        self.plan = plan or RunPlan()
        self.scaling = LossScaling(name) if scaling is None else scaling
        self.loss_terms: int | Callable[[], tf.Tensor] | None = None
        self.topology = find_topology(model.distribute_strategy)
        self.skipped: tuple[tf.Variable, ...] = ()
        self.streaks: tuple[Streak, ...] = ()
        self.empty: tuple[tf.Variable, ...] = ()
        self._model = weakref.ref(model)
        self._tokens: tuple[tf.Variable, ...] = ()
        self._scope = ""

    def find_model(self) -> keras.Model | None:
        """Return the model, or None if it has been deleted."""
        return self._model()

    @property
    def model(self) -> keras.Model:
        """The model, which must not have been deleted."""
        model = self._model()
        assert model is not None
        return model

    @property
    def clock(self) -> tf.Tensor:
        """Number of updates of the weights so far, int64."""
        return tf.cast(self.inner_optimizer.iterations, tf.int64)

    @property
    def rank(self) -> int:
        """Rank of the replica that is being traced or run."""
        local = self.topology.local
        return local[0] if len(local) == 1 else replica_id()

    def terms_of(self, batch: LossBatch) -> tuple[LossTerms, ...]:
        """Return the terms of the losses of a batch; empty if unknown."""
        if batch.terms or self.loss_terms is None:
            return batch.terms
        count = self.loss_terms
        return (mean_over(count() if callable(count) else count),)

    def create(self) -> None:
        """Create the step counters and ordering tokens of local replicas."""
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
            # Number the optimizers: their collectives need different keys. All
            # workers build the optimizers in the same order.
            self._scope = f"{self.name}:{next(_optimizer_numbers)}"

    def for_each(self, make: Callable[[int], T]) -> tuple[T, ...]:
        """Call `make(rank)` for each local replica, on its device.

        Variables are not mirrored: their shapes may differ between replicas.
        """
        states = []
        local = zip(self.topology.local, self.topology.devices, strict=True)
        for rank, device in local:
            with tf.init_scope(), tf.device(device):
                states.append(make(rank))
        return tuple(states)

    def local_state(self, states: Sequence[T]) -> T:
        """Return the item of the current replica in a result of `for_each`."""
        return self.at(states, self.rank)

    def at(self, states: Sequence[T], rank: int) -> T:
        """Return the item of a local replica in a result of `for_each`."""
        return states[self.topology.local.index(rank)]

    def group(self, purpose: str = "") -> Communicator:
        """Create the communicator of all replicas for the current trace.

        `purpose` is part of the keys of the collectives, and required for
        collectives in another order than the collectives of the step.
        """
        topology = self.topology
        if len(topology.local) > 1:
            if tf.executing_eagerly():
                refuse_eager_replicas()
            order_by_replica(topology.devices)
        return Communicator(
            self.rank,
            topology.replicas,
            f"{self._scope} {purpose}".strip(),
            topology.hint,
            len(topology.local) > 1,
            self.local_state(self._tokens) if self._tokens else None,
        )

    def among_processes(self, purpose: str) -> Communicator:
        """Create the communicator of all processes, outside of graphs."""
        topology = self.topology
        scope = f"{self._scope} {purpose}"
        return Communicator(topology.process, topology.processes, scope)
