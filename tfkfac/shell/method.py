"""Interface between a paper's method and the Keras optimizer around it."""

import abc
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.graphs import Tracked
from tfkfac.saving.entries import Contents
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.training.job import Job
from tfkfac.training.step import Step


class Method(abc.ABC):
    """A way to turn gradients into steps, with the state that it keeps.

    A method is plain Python around TensorFlow: it does not know that it is
    inside a Keras optimizer, and a test can run it on a `Job` and a `Step` of
    its own.

    Args:
        settings: Frozen dataclass of the optimizer's arguments.

    Attributes:
        settings: The same dataclass. The optimizer shows its fields as
            attributes, and saves them in its config.
        job: What it is attached to.
    """

    job: Job

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def hyperparameters(self) -> list[Hyperparameter]:
        """Return the arguments that can be changed during training."""
        values = vars(self.settings).values()
        return [v for v in values if isinstance(v, Hyperparameter)]

    @abc.abstractmethod
    def attach(self, job: Job) -> None:
        """Binds the method to a job and taps the job's model.

        Called before the first forward pass, and again with the same job
        whenever the model is compiled anew. The model may not be built yet.
        """

    @abc.abstractmethod
    def create(self) -> Sequence[Tracked]:
        """Creates the state of each replica of this process; keeps what fits.

        The model is built.
        """

    def expect(  # noqa: B027 (few need it)
        self, steps: int | None, remaining: int | None = None
    ) -> None:
        """Learns how many training steps all epochs of `fit` will make.

        And how many of them remain, from its first epoch on. None if `fit`
        does not know it. Called on every worker after `attach`; the state may
        not exist yet. In loops of one's own nobody calls it.
        """

    @abc.abstractmethod
    def run(self, step: Step) -> None:
        """Does one training step."""

    def covered(self) -> list[keras.Variable]:
        """The weights that a rest optimizer does not get: all."""
        return list(self.job.model.trainable_variables)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The replicas that a replica shares a mean loss with: all."""
        return tuple(range(self.job.topology.replicas))

    def agreement(self) -> dict[str, Any]:
        """Facts that all workers must have in common, by name, for JSON."""
        return {}

    @abc.abstractmethod
    def contents(self, rank: int) -> Contents:
        """The state to save of a replica of this process."""

    @abc.abstractmethod
    def events(self) -> list[tuple[str, tf.Variable]]:
        """Counts of the events that should not happen, with their names.

        A name can have a count of each replica of this process.
        """

    @abc.abstractmethod
    def summary(self) -> list[str]:
        """The lines of the summary, for a built model."""

    @abc.abstractmethod
    def state_bytes(self) -> dict[str, int]:
        """Bytes of this replica's state by kind, for a built model."""

    @abc.abstractmethod
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes this replica receives, by kind of step, for a built model."""
