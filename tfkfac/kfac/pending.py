"""Micro-batches until they make one step: gradients and statistics."""

from collections.abc import Mapping

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.graphs import zeros_variable
from tfkfac.compat.variables import Tracked
from tfkfac.saving.entries import Entry, Spread
from tfkfac.training.accumulation import PENDING, Accumulation
from tfkfac.training.step import Step


class Pending(Tracked):
    """What the micro-batches of one step come to so far, of one replica.

    Gradients and statistics are sums, so that the memory does not depend on
    the number of micro-batches, and many of them are as one batch.

    Args:
        gradients: The sums of gradients.
        blocks: The blocks whose statistics the replica takes, by position.
    """

    def __init__(
        self, gradients: Accumulation, blocks: Mapping[int, Block]
    ) -> None:
        super().__init__(name="pending")
        self._gradients = gradients
        self._blocks = dict(blocks)
        self._positions = tuple(blocks)
        self._sums = [StatisticSums(block) for block in blocks.values()]

    def is_for(self, blocks: Mapping[int, Block]) -> bool:
        """Whether these are the blocks, as far as sums of theirs go."""
        return [(i, b.path, b.factors) for i, b in blocks.items()] == [
            (i, b.path, b.factors) for i, b in self._blocks.items()
        ]

    def add_gradients(self, step: Step) -> None:
        """Adds the gradients of a micro-batch."""
        self._gradients.add(step)

    def add_statistics(
        self, statistics: Mapping[int, Mapping[str, Statistic]]
    ) -> tf.Tensor:
        """Adds the statistics of a micro-batch."""
        for position, sums in zip(self._positions, self._sums, strict=True):
            if position in statistics:
                sums.add(statistics[position])
        return tf.constant(0)

    @property
    def count(self) -> tf.Tensor:
        """Number of micro-batches that have been added."""
        return tf.convert_to_tensor(self._gradients.count)

    def is_complete(self) -> tf.Tensor:
        """Whether the last micro-batch of a step has been added."""
        return self._gradients.is_complete()

    def merged(self, step: Step) -> Step:
        """The step of all micro-batches, in the place of the last one's."""
        return self._gradients.merged(step)

    def statistics(self) -> dict[int, dict[str, Statistic]]:
        """The statistics that have been added, by position."""
        pairs = zip(self._positions, self._sums, strict=True)
        return {position: sums.values() for position, sums in pairs}

    def reset(self) -> tf.Tensor:
        """Forgets what has been added."""
        self._gradients.reset()
        for sums in self._sums:
            sums.reset()
        return tf.constant(0)

    def entries(self) -> list[Entry]:
        """All variables to save."""
        statistics = [entry for sums in self._sums for entry in sums.entries()]
        return [*self._gradients.entries(), *statistics]


class StatisticSums(Tracked):
    """Adds up the statistics of one block.

    Args:
        block: The block.
    """

    def __init__(self, block: Block) -> None:
        super().__init__(name="statistics")
        kinds, dtype = block.factors, block.dtype
        self._path = block.path
        self._names = tuple(kinds)
        self._totals = [
            zeros_variable(kind.shape, dtype, name)
            for name, kind in kinds.items()
        ]
        self._counts = zeros_variable([len(kinds)], dtype, "counts")

    def add(self, statistics: Mapping[str, Statistic]) -> None:
        """Adds those of a micro-batch."""
        for name, total in zip(self._names, self._totals, strict=True):
            total.assign_add(statistics[name].total)
        self._counts.assign_add(
            tf.stack([statistics[name].count for name in self._names])
        )

    def values(self) -> dict[str, Statistic]:
        """What has been added, by name."""
        counts = tf.unstack(tf.convert_to_tensor(self._counts))
        return {
            name: Statistic(tf.convert_to_tensor(total), count)
            for name, total, count in zip(
                self._names, self._totals, counts, strict=True
            )
        }

    def reset(self) -> None:
        """Forgets what has been added."""
        for variable in (*self._totals, self._counts):
            variable.assign(tf.zeros_like(variable))

    def entries(self) -> list[Entry]:
        """All variables to save."""
        names = [*self._names, "counts"]
        sums = (*self._totals, self._counts)
        return [
            Entry(
                self._path,
                name,
                variable,
                Spread.PARTIAL,
                PENDING,
                is_finite=False,
            )
            for name, variable in zip(names, sums, strict=True)
        ]
