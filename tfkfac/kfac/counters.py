"""How often what has happened to each block."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.saving.entries import Entry, Spread

# What goes wrong where a factor or a decomposition is kept, and what all
# replicas tell each other of it.
FAULTS = {
    "rejected": "statistics not finite in",
    "dropped": "factors dropped of",
    "failures": "failed decompositions of",
    "plain": "plain gradients in",
}


class Counters(Tracked):
    """One number for each block of a replica, by position.

    The numbers of all blocks are in one variable of each kind: a step reads
    and raises them all at once.

    Args:
        paths: The blocks' paths.

    Attributes:
        observed: Statistics taken so far.
        decomposed: Decompositions so far, the failed ones too.
        unexplained: Gradients that no recorded pass explains.
        rejected: Statistics that were not finite.
        dropped: Averages that were not finite.
        failures: Failed decompositions.
        plain: Gradients that were not preconditioned, as the result was wrong.
        told: Numbers of `FAULTS` that the other replicas know of.
        elsewhere: Steps with such a fault on others alone.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(name="counters")
        self.paths = tuple(paths)
        self.observed = self._zeros("observed")
        self.decomposed = self._zeros("decomposed")
        self.unexplained = self._zeros("unexplained_gradients")
        self.rejected = self._zeros("rejected_statistics")
        self.dropped = self._zeros("dropped_factors")
        self.failures = self._zeros("failed_decompositions")
        self.plain = self._zeros("plain_gradients")
        kinds = len(FAULTS)
        self.told = self._zeros("told_faults", kinds)
        self.elsewhere = self._zeros("faults_elsewhere", kinds)

    def _zeros(self, name: str, *kinds: int) -> tf.Variable:
        zeros = tf.zeros([*kinds, len(self.paths)], tf.int64)
        return state_variable(zeros, "int64", name)

    def _all(self) -> tuple[tf.Variable, ...]:
        return (
            self.observed,
            self.decomposed,
            self.unexplained,
            self.rejected,
            self.dropped,
            self.failures,
            self.plain,
        )

    def take(self, other: "Counters", places: Mapping[int, int]) -> None:
        """Takes over numbers of blocks that stay.

        Args:
            other: Other counters.
            places: Their places there, by position here.
        """
        for mine, theirs in zip(self._all(), other._all(), strict=True):
            for i, place in places.items():
                Number(mine, i).assign(theirs[place])
        for i, place in places.items():
            self.told[:, i].assign(other.told[:, place])
            self.elsewhere[:, i].assign(other.elsewhere[:, place])

    def news(self) -> tf.Tensor:
        """Whether others have to be told of each fault of each block."""
        return self._faults() > self.told

    def hear(self, own: tf.Tensor, anywhere: tf.Tensor) -> None:
        """Notes the faults on others; they know this replica's now.

        Args:
            own: The `news` of this replica.
            anywhere: Whether any replica has had these.
        """
        elsewhere = tf.logical_and(anywhere, tf.logical_not(own))
        self.elsewhere.assign_add(tf.cast(elsewhere, tf.int64))
        self.told.assign(self._faults())

    def _faults(self) -> tf.Tensor:
        return tf.stack([getattr(self, name) for name in FAULTS])

    def events(self) -> list[tuple[str, "Everywhere"]]:
        """How often each fault has happened to each block, on any replica."""
        return [
            (
                f"{text} {path}",
                Everywhere(getattr(self, name), self.elsewhere, kind, i),
            )
            for kind, (name, text) in enumerate(FAULTS.items())
            for i, path in enumerate(self.paths)
        ]

    def clocks(self, place: int, spread: Spread) -> list[Entry]:
        """What has been done with a block, to be saved."""
        named = [("observed", self.observed), ("decomposed", self.decomposed)]
        path = self.paths[place]
        return [
            Entry(path, name, Number(numbers, place), spread)
            for name, numbers in named
        ]

    def faults(
        self, place: int, has_factors: bool, has_decomposition: bool
    ) -> list[Entry]:
        """What has gone wrong with a block where it is, to be saved."""
        named = [("rejected", self.rejected)] * has_factors
        named += [("failures", self.failures)] * has_decomposition
        path = self.paths[place]
        return [
            Entry(path, name, Number(numbers, place), Spread.OWNED)
            for name, numbers in named
        ]

    def decompose_anew(self) -> None:
        """Forgets that there have been decompositions."""
        self.decomposed.assign(tf.zeros_like(self.decomposed))

    def ask(self, flags: tf.Tensor) -> None:
        """Has some blocks decomposed anew in the next step.

        Args:
            flags: Whether each of all blocks is to be.
        """
        old = self.decomposed
        old.assign(tf.where(flags, tf.zeros_like(old), old))

    def asked(self) -> tf.Tensor:
        """Whether each block has to be decomposed as soon as it can be."""
        return tf.equal(self.decomposed, 0)

    def without_statistics(self) -> tf.Tensor:
        """Whether each block has none yet."""
        return tf.equal(self.observed, 0)

    def to_decompose(self, due: tf.Tensor, asked: tf.Tensor) -> tf.Tensor:
        """Whether each block is to be: never before it has statistics.

        Args:
            due: Whether an interval ends here.
            asked: Whether any worker has asked for each, see `asked`.
        """
        return tf.logical_and(self.observed > 0, tf.logical_or(due, asked))

    def by_position(
        self, flags: Mapping[int, tf.Tensor], otherwise: bool
    ) -> tf.Tensor:
        """Flags of some blocks as one tensor of all.

        Args:
            flags: Scalar bools by position.
            otherwise: What stands for the others.
        """
        rest = tf.constant(otherwise)
        every = [flags.get(i, rest) for i in range(len(self.paths))]
        return tf.stack(every) if every else tf.zeros([0], tf.bool)


class Number:
    """One number of a variable, to be saved and loaded as one by itself."""

    def __init__(self, numbers: tf.Variable, place: int) -> None:
        self._numbers = numbers
        self._place = place
        self.shape, self.dtype = tf.TensorShape([]), numbers.dtype

    def numpy(self) -> int:
        """Returns the number."""
        return self._numbers.numpy()[self._place]

    def assign(self, value: tf.Tensor) -> None:
        """Changes the number."""
        self._numbers.assign(
            tf.tensor_scatter_nd_update(self._numbers, [[self._place]], [value])
        )


class Everywhere(NamedTuple):
    """A number of a fault of a block on this replica, and on others alone."""

    own: tf.Variable
    elsewhere: tf.Variable
    kind: int
    place: int

    def numpy(self) -> int:
        """Returns their sum."""
        others = self.elsewhere.numpy()[self.kind, self.place]
        return int(self.own.numpy()[self.place] + others)
