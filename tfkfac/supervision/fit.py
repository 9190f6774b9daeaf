"""What the workers of a job do together around `fit`.

They begin only if all are at the same point: a worker that has gone back to
another backup than the others would train on in silence, or hang all of them.
And they gather their state where one of them is about to save.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
from typing_extensions import override

from tfkfac.cluster.watch import Standstill, find_standstill
from tfkfac.compat.models import around_evaluate, around_fit, first_epoch
from tfkfac.compat.optimizers import raw_iterations
from tfkfac.distributed.agreement import (
    check_agreement,
    exchange,
    find_differences,
    first_of,
)
from tfkfac.distributed.topology import find_topology
from tfkfac.saving.entries import Spread
from tfkfac.shell.carry import ours
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.supervision.aftermath import Aftermath
from tfkfac.supervision.comparison import Comparison, checksum
from tfkfac.supervision.run_length import RunLength
from tfkfac.training.guards import as_errors


def with_ours(
    model: keras.Model,
    callbacks: list[keras.callbacks.Callback],
    initial_epoch: int,
) -> list[keras.callbacks.Callback]:
    """The callbacks of a `fit`, with those of ours that it needs."""
    optimizer = ours(getattr(model, "optimizer", None))
    if optimizer is None:
        return callbacks
    told = [Aftermath(optimizer), *callbacks, RunLength(optimizer)]
    standstill = find_standstill(model.distribute_strategy)
    if standstill is not None:
        told = [Pulse(standstill), *told]
    if find_topology(model.distribute_strategy).processes == 1:
        return told
    first = Comparison(optimizer), Gathering(optimizer, callbacks)
    return [*first, *told, Agreement(optimizer, initial_epoch)]


def watched(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """What a `fit` or an `evaluate` runs in, with an optimizer of any kind.

    Under a strategy of ours other workers learn if it fails, and the reverse.
    """
    watch = getattr(model.distribute_strategy, "watch", None)
    return contextlib.nullcontext() if watch is None else watch.fit()


@contextlib.contextmanager
def surroundings(
    model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
) -> Iterator[None]:
    """What a `fit` runs in; a callback that is a context is entered."""
    optimizer = ours(getattr(model, "optimizer", None))
    standstill = None
    if optimizer is not None:
        standstill = find_standstill(model.distribute_strategy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watched(model))
        stack.enter_context(as_errors())
        if standstill is not None:
            stack.enter_context(standstill.training())
        for one in callbacks:
            if isinstance(one, contextlib.AbstractContextManager):
                stack.enter_context(one)
        yield


class Gathering(keras.callbacks.Callback):
    """Gathers the state before the callbacks that save it.

    A callback saves if it has a `save_freq`, as Keras' have: "epoch" or a
    number of batches. It may be on one worker alone. One whose attribute
    `is_collective` is true has to be on all.

    Args:
        optimizer: The optimizer.
        callbacks: The other callbacks.
    """

    def __init__(
        self,
        optimizer: SecondOrderOptimizer,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._own = [getattr(one, "save_freq", None) for one in callbacks]
        self._collective = [
            type(one).__name__
            for one in callbacks
            if getattr(one, "is_collective", False)
        ]
        self._all: set[str | int] = set()
        self._batches = 0

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        if not self._optimizer.built:
            self._optimizer.build(self.model.trainable_variables)
        group = self._optimizer.method.job.among_processes("callbacks")
        own = [freq for freq in self._own if freq is not None]
        theirs = exchange(
            {"save_freq": own, "callbacks": self._collective}, group
        )
        self._all = {freq for one in theirs for freq in one["save_freq"]}
        found = [{"callbacks": one["callbacks"]} for one in theirs]
        _refuse("These callbacks must be on all workers", found)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        numbers = [freq for freq in self._all if isinstance(freq, int)]
        if any(self._batches % number == 0 for number in numbers):
            self._optimizer.gather_state()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if "epoch" in self._all:
            self._optimizer.gather_state()


class Pulse(keras.callbacks.Callback):
    """Tells that training does not stand still.

    Args:
        standstill: Who looks after it.
    """

    def __init__(self, standstill: Standstill) -> None:
        super().__init__()
        self._standstill = standstill

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._standstill.moves()

    @override
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_end(batch)


class Agreement(keras.callbacks.Callback):
    """Compares the workers before the first epoch; the last of all.

    Args:
        optimizer: The optimizer.
        initial_epoch: The argument of `fit`.
    """

    def __init__(
        self, optimizer: SecondOrderOptimizer, initial_epoch: int
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._initial_epoch = initial_epoch

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        group = self._optimizer.method.job.among_processes("begin")
        # Again: much of it may have changed since the optimizer was built.
        check_agreement(self._optimizer.description(), group)
        facts = {
            "epoch": first_epoch(self.model, self._initial_epoch),
            "epochs": self.params.get("epochs"),
            "steps per epoch": self.params.get("steps"),
            **where_training_is(self._optimizer),
        }
        _refuse(
            "All workers must begin training at the same point. If they have "
            "been restarted, let them go back to one backup: "
            "`tfkfac.callbacks.ChiefBackup`. These differ",
            exchange(facts, group),
        )


def where_training_is(optimizer: SecondOrderOptimizer) -> dict[str, Any]:
    """What all workers have in common before a step, in few numbers."""
    method, job = optimizer.method, optimizer.method.job
    rank = job.topology.local[0]
    counts = [
        entry.variable
        for entry in method.contents(rank).entries
        if entry.spread is Spread.REPLICATED and entry.variable.dtype.is_integer
    ]
    facts = {
        "updates": int(raw_iterations(job.inner_optimizer).numpy()),
        "digest of the weights": digest(job.model.trainable_variables),
        "digest of the counters": digest(counts),
    }
    if len(method.peers(rank)) == job.topology.replicas:
        state = digest(job.inner_optimizer.variables)
        facts["digest of the inner optimizer"] = state
    return facts


def digest(variables: Iterable[Any]) -> str:
    """A checksum in hexadecimal digits."""
    return f"{checksum(variables):08x}"


def _refuse(message: str, descriptions: Sequence[dict[str, Any]]) -> None:
    """Raises, on every worker, if what they have shown is not the same."""
    differences = find_differences(descriptions)
    if differences:
        raise ValueError(f"{message}: {first_of(differences)}")


def install() -> None:
    """From now on, every `Model.fit` has our callbacks and is watched.

    And every `Model.evaluate` is watched.
    """
    around_fit(with_ours, surroundings)
    around_evaluate(watched)
