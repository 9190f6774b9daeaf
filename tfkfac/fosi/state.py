"""What one replica keeps."""

import tensorflow as tf
from typing_extensions import override

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.fosi.accelerator import Accelerator
from tfkfac.fosi.final_update import FinalUpdate
from tfkfac.fosi.layouts import Layout
from tfkfac.fosi.subspace import Subspace
from tfkfac.saving.entries import Contents, Entry, Spread


class State(Tracked):
    """The curvature state of one replica.

    Args:
        layout: How the directions are shared.
        subspace: The directions; None on an accelerator.

    Attributes:
        estimations: Number of estimations so far.
        last: The update before which the last one was done or begun; -1 if
            there was none.
        failures: Number of estimations that were not finite.
        forgotten: How often directions were none, so that they were dropped.
        warmup: Updates before the first one, where `fit` has told the length
            of the run; else -1.
        largest_rate: The largest learning rate so far of the inner optimizer.
    """

    def __init__(self, layout: Layout, subspace: Subspace | None) -> None:
        super().__init__(name="replica")
        self.layout = layout
        self.subspace = subspace
        self.estimations = state_variable(0, "int64", "estimations")
        self.last = state_variable(-1, "int64", "last_estimation")
        self.failures = state_variable(0, "int64", "failures")
        self.forgotten = state_variable(0, "int64", "forgotten")
        self.warmup = state_variable(-1, "int64", "warmup")
        self.largest_rate = state_variable(0, "float64", "largest_rate")

    @property
    def existing_subspace(self) -> Subspace:
        """The directions, on a replica that trains."""
        assert self.subspace is not None
        return self.subspace

    @staticmethod
    def bytes() -> int:
        """Bytes of the counters."""
        return 5 * tf.int64.size + tf.float64.size

    def forget(self) -> None:
        """Drops the directions; the next step estimates them anew."""
        self.existing_subspace.forget()
        self.estimations.assign(0)
        self.last.assign(-1)

    def contents(self, rank: int) -> Contents:
        """What is to be saved.

        Args:
            rank: The replica.
        """
        entries = [
            Entry("", "last_estimation", self.last, least=-1),
            Entry("", "warmup", self.warmup, least=-1),
            Entry("", "largest_rate", self.largest_rate, least=0),
        ]
        if self.subspace is not None:
            entries += [
                Entry("", "estimations", self.estimations, Spread.OWNED),
                Entry("", "failures", self.failures, Spread.OWNED),
                *self.subspace.entries(rank),
            ]
        return Contents(entries)


class RoleState(State):
    """The state of one replica of a job with accelerators.

    Attributes:
        accelerator: The iteration under way; None on workers.
        progress: Number of its iterations done; 0 when none is under way.
        final_update: What workers remember of an interval for the published
            final update; None without it.
        part: The part of the state that an estimation under way is.
        times: Idle and all seconds of each replica `(replicas, 2)`.
        arrived: When this replica last came to the meeting that ends a step.
        left: When it last left it.
    """

    def __init__(
        self,
        layout: Layout,
        subspace: Subspace | None,
        accelerator: Accelerator | None,
        final_update: FinalUpdate | None,
        replicas: int,
        part: str,
    ) -> None:
        super().__init__(layout, subspace)
        self.part = part
        self.accelerator = accelerator
        self.final_update = final_update
        self.progress = state_variable(0, "int64", "progress")
        times = tf.zeros([replicas, 2])
        self.times = state_variable(times, "float64", "times")
        self.arrived = state_variable(0, "float64", "arrived")
        self.left = state_variable(0, "float64", "left")

    @override
    def forget(self) -> None:
        """Drops the directions; those of the interval under way come next."""
        # All replicas count together from the last beginning.
        last = tf.identity(self.last)
        super().forget()
        self.last.assign(last)

    @override
    def contents(self, rank: int) -> Contents:
        """What is to be saved: the estimation under way too.

        Accelerators divide it, and hold their own parts of a batch, so another
        number of them begins another one.

        Args:
            rank: The replica.
        """
        own = super().contents(rank)
        progress = Entry("", "progress", self.progress, part=self.part)
        own.entries.append(progress)
        if self.accelerator is not None:
            own.entries.extend(self.accelerator.entries(self.part))
        if self.final_update is not None:
            own.entries.extend(self.final_update.entries(self.part))
        parts = {self.part: lambda: self.progress.assign(0)}
        idle = [] if int(self.progress.numpy()) else [self.part]
        return Contents(own.entries, parts=parts, idle=frozenset(idle))

    @staticmethod
    def role_bytes(replicas: int) -> int:
        """Bytes of the counters and times."""
        times = 2 * replicas + 2
        return State.bytes() + tf.int64.size + times * tf.float64.size
