"""The duties of an optimizer around the steps of a `fit`."""

import collections
import sys
from collections.abc import Sequence
from typing import Any

import keras
from typing_extensions import override

from tfkfac.cluster.watch import Standstill, find_standstill
from tfkfac.compat.models import first_epoch
from tfkfac.distributed.agreement import exchange
from tfkfac.distributed.topology import find_topology
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.supervision import comparison


class Supervision(keras.callbacks.Callback):
    """Does what an optimizer of ours has to do in `fit` beside its steps.

    It comes before the callbacks of the user, on all workers:

    - In a job of several processes it compares the workers now and then and
      where an epoch ends, and then gathers their state if a callback is about
      to save it. A callback saves if it has a `save_freq`, as Keras' have:
      "epoch" or a number of batches. It may be on one worker alone. One whose
      attribute `is_collective` is true has to be on all.
    - It tells that training does not stand still.
    - It ends a `fit` that skips too many steps, and says what went wrong in
      it. In XLA, where nothing can be printed, that is the only word of it.

    When all callbacks have begun, which `last` hears, it tells the method the
    length of the run and compares where the workers are. `callbacks` are those
    of the user, `initial_epoch` is the argument of `fit`.
    """

    def __init__(
        self,
        optimizer: SecondOrderOptimizer,
        callbacks: Sequence[keras.callbacks.Callback],
        initial_epoch: int,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._callbacks = callbacks
        self._initial_epoch = initial_epoch
        self._standstill: Standstill | None = None
        self._is_alone = True
        self._frequencies: set[str | int | None] = set()
        self._batches = 0
        self._events: dict[str, int] = {}

    @property
    def last(self) -> keras.callbacks.Callback:
        """The callback to put after all others."""
        return keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self._begin_together()
        )

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        self._standstill = find_standstill(strategy)
        self._is_alone = find_topology(strategy).processes == 1
        if not self._is_alone:
            self._exchange_frequencies()
        self._events = self._optimizer.events()

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if not self._is_alone:
            if self._batches % comparison.EVERY == 0:
                comparison.compare_bits(self._optimizer)
            numbers = [n for n in self._frequencies if isinstance(n, int)]
            if any(self._batches % number == 0 for number in numbers):
                self._optimizer.gather_state()
        self.on_test_batch_end(batch)
        self._optimizer.count_steps(self.model.steps_per_execution)

    @override
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._standstill is not None:
            self._standstill.record_step()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_alone:
            comparison.compare_bits(self._optimizer)
            if "epoch" in self._frequencies:
                self._optimizer.gather_state()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        before = collections.Counter(self._events)
        new = collections.Counter(self._optimizer.events()) - before
        if not self._is_alone:
            group = self._optimizer.method.job.among_processes("events")
            # Workers that share a block count the same faults: no sum.
            for counts in exchange(new, group):
                new |= collections.Counter(counts)
        if new:
            said = "; ".join(f"{text}: {n}" for text, n in new.items())
            name = self._optimizer.name
            print(f"tfkfac: {name} in this fit: {said}", file=sys.stderr)

    def _exchange_frequencies(self) -> None:
        """Learns when a callback of any worker saves."""
        if not self._optimizer.built:
            self._optimizer.build(self.model.trainable_variables)
        own = [getattr(one, "save_freq", None) for one in self._callbacks]
        collective = [
            type(one).__name__
            for one in self._callbacks
            if getattr(one, "is_collective", False)
        ]
        everybody = exchange(
            {"save_freq": own, "callbacks": collective},
            self._optimizer.method.job.among_processes("callbacks"),
        )
        self._frequencies = {f for one in everybody for f in one["save_freq"]}
        comparison.refuse_differences(
            "These callbacks must be on all workers",
            [{"callbacks": one["callbacks"]} for one in everybody],
        )

    def _begin_together(self) -> None:
        """Begins the run, once all callbacks have."""
        epochs, steps = self.params.get("epochs"), self.params.get("steps")
        epoch = first_epoch(self.model, self._initial_epoch)
        total = remaining = None
        if steps is not None:
            total, remaining = epochs * steps, (epochs - epoch) * steps
        self._optimizer.method.expect(total, remaining)
        if not self._is_alone:
            run = {
                "epoch": epoch,
                "epochs": epochs,
                "steps per epoch": steps,
            }
            comparison.compare_beginnings(self._optimizer, run)
