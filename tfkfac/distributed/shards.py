"""Vectors of which every member of a group keeps a slice."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfkfac.distributed.collectives import Communicator


class Shards:
    """Slices of equal length of a vector, by rank; the last end in zeros.

    Args:
        size: Length of the vector.
        count: Number of slices.
        padded: Gives the length of a slice, from the least that is enough.
    """

    def __init__(
        self, size: int, count: int, padded: Callable[[int], int] = int
    ) -> None:
        self.size = size
        self.count = count
        self.length = padded(-(-size // count))

    def range(self, rank: int) -> slice:
        """The elements of a slice; may be none."""
        start = min(rank * self.length, self.size)
        return slice(start, min(start + self.length, self.size))

    @property
    def whole(self) -> int:
        """Length of all slices together."""
        return self.count * self.length

    def own(self, vector: tf.Tensor, rank: int) -> tf.Tensor:
        """The slices, of one rank, of vectors `(..., size)`.

        Those of `(..., whole)`, which end in zeros, need no copy.
        """
        if vector.shape[-1] == self.whole:
            start = rank * self.length
            return vector[..., start : start + self.length]
        part = vector[..., self.range(rank)]
        missing = self.length - part.shape[-1]
        padding = [[0, 0]] * (vector.shape.rank - 1) + [[0, missing]]
        return tf.pad(part, padding) if missing else part

    def gather(self, shard: tf.Tensor, communicator: Communicator) -> tf.Tensor:
        """The vector of which this rank has a slice."""
        (vector,) = self.gather_all([shard], communicator)
        return vector[: self.size]

    def gather_all(
        self, shards: Sequence[tf.Tensor], communicator: Communicator
    ) -> list[tf.Tensor]:
        """The vectors `(whole,)` of which this rank has slices."""
        if self.count == 1:
            return list(shards)
        gathered = communicator.all_gather(tf.stack(shards))
        return [tf.reshape(part, [-1]) for part in tf.unstack(gathered, axis=1)]

    def reduce(
        self, vector: tf.Tensor, communicator: Communicator
    ) -> tf.Tensor:
        """This rank's slice of the sum of all vectors."""
        if self.count == 1:
            return self.own(vector, 0)
        padding = self.whole - vector.shape[0]
        padded = tf.pad(vector, [[0, padding]]) if padding else vector
        return communicator.reduce_scatter(
            tf.reshape(padded, [self.count, self.length])
        )
