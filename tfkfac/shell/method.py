"""Interface between a paper's method and the Keras optimizer."""

import abc
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.graphs import Tracked
from tfkfac.compat.overrides import Below
from tfkfac.saving.entries import Contents
from tfkfac.training.job import Job
from tfkfac.training.step import Step


class Method(abc.ABC):
    """Base class of the optimization methods, with their state.

    A method does not depend on the Keras optimizer: a test can run it with a
    `Job` and a `Step`. The optimizer has the fields of `settings`, a frozen
    dataclass, as attributes, and saves them in its config.
    """

    job: Job
    takes_float8 = False  # see `shell.model.check_settings`

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abc.abstractmethod
    def attach(self, job: Job) -> None:
        """Bind the method to a job, and record the layers of its model.

        Called before the first forward pass, and again after each `compile`.
        The model may not be built yet.
        """

    @abc.abstractmethod
    def create(self) -> Sequence[Tracked]:
        """Create or reuse the state of local replicas; the model is built."""

    def set_run_length(self, steps: int | None) -> None:  # noqa: B027
        """Set the number of training steps of the current `fit`, or None.

        Called on every worker after `attach`, possibly before the state exists.
        Not called in custom training loops.
        """

    @abc.abstractmethod
    def run(self, step: Step) -> None:
        """Run one training step."""

    def run_compiled(self, below: Below, data: Any) -> Any:
        """Call Keras' training step, which XLA compiles, outside of XLA."""
        return below(data)

    def covered(self) -> list[keras.Variable]:
        """Return the weights that the inner optimizer updates; default: all."""
        return list(self.job.model.trainable_variables)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the replicas that average a loss with `rank`; default: all."""
        return tuple(range(self.job.topology.replicas))

    def accumulation(self) -> tuple[int, int]:
        """Return the micro-batches per update and since the last update."""
        return 1, 0

    def agreement(self) -> dict[str, Any]:
        """Return JSON values by name that must be equal on all workers."""
        return {}

    @abc.abstractmethod
    def contents(self, rank: int) -> Contents:
        """Return the state to save for the local replica `rank`."""

    @abc.abstractmethod
    def events(self) -> list[tuple[str, tf.Variable]]:
        """Return names and counts of unexpected events of local replicas."""

    @abc.abstractmethod
    def summary(self) -> list[str]:
        """Return the lines of the summary, for a built model."""

    @abc.abstractmethod
    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of a replica's state by name, for a built model."""

    @abc.abstractmethod
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes received in each type of step, for a built model."""
