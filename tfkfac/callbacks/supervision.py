"""Callback that supervises each `fit` with an optimizer of tfkfac."""

import collections
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras
from typing_extensions import override

from tfkfac.callbacks import comparison
from tfkfac.cluster.waiting import print_line
from tfkfac.compat.models import first_epoch
from tfkfac.distributed.agreement import exchange, refuse_differences
from tfkfac.distributed.topology import find_topology
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.training.guards import largest_counts

# Batches since a callback with an integer `save_freq` saved: Keras counts them
# over several calls of `fit`.
_batches_since_save: weakref.WeakKeyDictionary[
    keras.callbacks.Callback, int
] = weakref.WeakKeyDictionary()
# Fraction of the steps of an epoch. Keras' `LossScaleOptimizer` does not count
# the steps that it skips: correct the plan only if more updates are missing.
_MAX_SKIPPED_FRACTION = 0.1


class Supervision(keras.callbacks.Callback):
    """Supervise a `fit`: compare workers, gather state, detect stalls.

    It runs on all workers, before the callbacks of the user:

    - In a job of several processes it compares the workers every
      `comparison.INTERVAL` batches and after each epoch. Before a callback of a
      worker saves the model, it gathers the state of all workers. A callback
      saves if it has an attribute `save_freq` like Keras' callbacks: "epoch"
      or a number of batches. A callback with a true attribute `is_collective`
      must be on all workers.
    - It records the end of each batch for `StallDetector`.
    - It counts the steps, and ends a `fit` with too many skipped steps. At
      the end of each epoch it collects the events of all workers, and at the
      end of `fit` it prints the events: a step compiled with XLA cannot print.

    After `on_train_begin` of all callbacks, `last` passes the number of steps
    to the method and the schedules, and compares the positions of the workers.
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
        self._is_alone = True
        # `save_freq` and batches since the last file of all callbacks.
        self._frequencies: list[tuple[str | int | None, int]] = []
        self._batches = 0
        # Number of batches before `fit`; None after the first epoch.
        self._first_batch: int | None = None
        # `plan.end` at the start of `fit`; loading a backup changes `plan.end`.
        self._previous_end: int | None = None
        self._events_before: collections.Counter[tuple[str, int]]
        self._events: collections.Counter[str] = collections.Counter()

    @property
    def last(self) -> keras.callbacks.Callback:
        """Callback that must come after all other callbacks."""
        return keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self._start_run()
        )

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._previous_end = self._optimizer.plan.end
        strategy = self.model.distribute_strategy
        self._is_alone = find_topology(strategy).processes == 1
        if not self._is_alone:
            if not self._optimizer.built:
                self._optimizer.build(self.model.trainable_variables)
            collective = [
                type(callback).__name__
                for callback in self._callbacks
                if getattr(callback, "is_collective", False)
            ]
            frequencies = [
                (callback.save_freq, _batches_since_save.get(callback, 0))
                for callback in self._callbacks
                if hasattr(callback, "save_freq")
            ]
            workers = exchange(
                {"save_freq": frequencies, "callbacks": collective},
                self._optimizer.method.job.among_processes("callbacks"),
            )
            self._frequencies = [
                tuple(f) for x in workers for f in x["save_freq"]
            ]
            refuse_differences(
                "These callbacks must be on all workers",
                [{"callbacks": worker["callbacks"]} for worker in workers],
            )
        self._events_before = self._optimizer.event_counts()

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._optimizer.plan.epoch.assign(epoch)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if not self._is_alone:
            if self._batches % comparison.INTERVAL == 0:
                comparison.compare_bits(self._optimizer)
            local = {
                x: advance(x.save_freq, _batches_since_save.get(x, 0))
                for x in self._callbacks
                if is_count(getattr(x, "save_freq", None))
            }
            _batches_since_save.update(local)
            self._frequencies = [
                (x, advance(x, count) if is_count(x) else count)
                for x, count in self._frequencies
            ]
            if any(is_count(x) and not n for x, n in self._frequencies):
                self._optimizer.gather_state()
        self.on_test_batch_end(batch)
        self._optimizer.count_steps(self.model.steps_per_execution)

    @override
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if getattr(strategy, "watch", None) is not None:
            strategy.watch.has_stepped = True
            strategy.stall_detector.record_step()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._first_batch is not None and not self.model.stop_training:
            # The number of batches per epoch may be unknown in the first epoch,
            # and a custom `train_step` may not update once for each batch.
            plan, now = self._optimizer.plan, self._optimizer.num_updates
            epochs, steps = self.params["epochs"], int(plan.steps.numpy())
            batches = self._num_batches() - self._first_batch
            num_left = self._count_updates((epochs - epoch - 1) * batches)
            if plan.end is None:
                plan.begin(now, num_left, epochs)
            elif steps == 0:
                plan.move_end(now, num_left, steps)
            elif abs(batches - steps) > _MAX_SKIPPED_FRACTION * steps:
                plan.length.assign(now - int(plan.start.numpy()) + num_left)
            self._first_batch = None
        # Count the events of this `fit` on all workers after each epoch:
        # workers may reach the end of `fit` at different times.
        total = self._optimizer.event_counts()
        self._events = largest_counts(total - self._events_before)
        if not self._is_alone:
            group = self._optimizer.method.job.among_processes("events")
            # Workers that share a block count the same events: take the
            # maximum, not the sum.
            for counts in exchange(self._events, group):
                self._events |= collections.Counter(counts)
            comparison.compare_bits(self._optimizer)
            if "epoch" in [frequency for frequency, _ in self._frequencies]:
                self._optimizer.gather_state()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._optimizer.check_rate(None)
        if self._events:
            counts = "; ".join(f"{x}: {n}" for x, n in self._events.items())
            print_line(f"{self._optimizer.name} in this fit: {counts}")

    def _num_batches(self) -> int:
        """Return the number of batches so far, also pending and skipped."""
        per_update, pending = self._optimizer.method.accumulation()
        steps = self._optimizer.num_updates + int(self._optimizer.skipped_steps)
        return steps * per_update + pending

    def _count_updates(self, batches: int) -> int:
        """Return the number of updates in the next `batches` batches."""
        per_update, pending = self._optimizer.method.accumulation()
        return (pending + batches) // per_update

    def _plan_run(self, epoch: int, epochs: int, steps: int | None) -> None:
        """Begin the plan of `FitDecay`, or continue the plan of a backup."""
        plan, now = self._optimizer.plan, self._optimizer.num_updates
        is_loaded = epoch > 0 or plan.end != self._previous_end
        saved_epochs = int(plan.epochs.numpy())
        has_plan = plan.end is not None and saved_epochs == epochs
        is_resumed = is_loaded and has_plan
        if (
            is_loaded
            and saved_epochs not in (0, epochs)
            and self._optimizer.has_decay
        ):
            print_line(
                "the learning rate begins again at its peak: the loaded state "
                f"is of a `fit` of {saved_epochs} epochs, not {epochs}."
            )
        skips = any(getattr(x, "num_skipped", 0) for x in self._callbacks)
        plan.in_fit.assign(1)
        # Without skipped batches, a partly finished epoch is repeated.
        at_position = int(plan.epoch.numpy()) + 1 == epoch + skips
        has_equal_data = int(plan.steps.numpy()) == (steps or 0)
        if is_resumed and at_position and has_equal_data:
            return
        is_resumed &= now < (plan.end or 0)
        if steps is None:
            if not is_resumed:
                plan.begin(now, 0, epochs)
                if (
                    epochs - epoch == 1
                    and self._optimizer.has_decay
                    and 0 in self._optimizer.method.job.topology.local
                ):
                    # No epoch of known length follows.
                    warnings.warn(
                        "The learning rate stays constant in this `fit`: its "
                        "number of batches is unknown. Pass `steps_per_epoch`, "
                        "or use `dataset.apply("
                        "tf.data.experimental.assert_cardinality(n))`.",
                        stacklevel=2,
                    )
            self._first_batch = self._num_batches()
            return
        num_left = max(self._count_updates((epochs - epoch) * steps), 1)
        if is_resumed:
            # The number of remaining batches may differ from the plan: after a
            # change of the batch size, or if Keras repeats an epoch.
            plan.move_end(now, num_left, steps)
        else:
            plan.begin(now, num_left, epochs, steps)
        if not skips and epochs - epoch > 1:
            self._first_batch = self._num_batches()

    def _start_run(self) -> None:
        """Set the run length of the method; check that all workers agree."""
        self._optimizer.check_iterations()
        epochs, steps = self.params.get("epochs"), self.params.get("steps")
        epoch = first_epoch(self.model, self._initial_epoch)
        total = None if steps is None else epochs * steps
        self._optimizer.method.set_run_length(total)
        self._plan_run(epoch, epochs, steps)
        plan = self._optimizer.plan
        if not self._is_alone:
            run = {
                "epoch": epoch,
                "epochs": epochs,
                "steps per epoch": steps,
                "updates of the learning rate's decay": [
                    int(plan.start.numpy()),
                    plan.end,
                    float(plan.scale.numpy()),
                ],
            }
            comparison.compare_beginnings(self._optimizer, run)


def is_count(save_freq: Any) -> bool:
    """True if a callback saves every `save_freq` batches."""
    is_integer = isinstance(save_freq, int)
    return is_integer and not isinstance(save_freq, bool) and save_freq > 0


def advance(save_freq: Any, count: int) -> int:
    """Return the batches since the last file after one more; 0 if it saves."""
    return 0 if count + 1 >= save_freq else count + 1
