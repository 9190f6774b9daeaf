"""Lanczos estimation of the extreme curvature, by all replicas together."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.distributed.collectives import (
    Communicator,
    all_reduce_bytes,
    differentiable_sum,
)
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import (
    Lanczos,
    Product,
    Tridiagonal,
    combine,
    random_vector,
    ritz_pairs,
)


class Spectrum(NamedTuple):
    """Ritz pairs of extreme curvature; NaN if the estimation failed."""

    values: tf.Tensor  # `(r,)`, ascending, bitwise equal on all workers
    rows: tf.Tensor  # slices `(r, n / C)` of the vectors, over C workers


class Estimation:
    """The distributed Lanczos iteration on one replica (DHO2, algorithm 2).

    Each replica keeps a slice of every row of the basis. The operator is the
    mean of the Hessians of the replicas of a group, weighted by their shares
    of the examples. Local Hessians would differ between the slices, so the
    operator would not be symmetric.
    """

    def __init__(
        self, geometry: Geometry, group: Communicator, seed: int
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.shards = geometry.slices(group.size)
        self._seed = seed

    def iteration(self, local: Product) -> Lanczos:
        """Return the Lanczos iteration for the sum of all local operators."""
        group = self.group

        def product(row: tf.Tensor) -> tf.Tensor:
            image = local(self.shards.gather(row, group))
            return self.shards.reduce(image, group)

        return Lanczos(product, self.geometry.size, self.draw, self.sum)

    def sum(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sum a vector of at most `steps + 1` elements over the group."""
        if self.group.size == 1:
            return numbers
        # Pad: collectives need a static shape, but `numbers` grows.
        count, limit = tf.size(numbers), self.geometry.steps + 1
        padded = tf.pad(numbers, [[0, limit - count]])
        (total,) = self.group.all_reduce([tf.ensure_shape(padded, [limit])])
        return total[:count]

    def differentiable_sum(self, vector: tf.Tensor) -> tf.Tensor:
        """Sum over the group, with derivatives of any order."""
        return differentiable_sum(self.group, vector)

    def draw(self, index: int | tf.Tensor) -> tf.Tensor:
        """Slice of a random vector of norm near 1; index -1: start vector."""
        vector = random_vector(self.geometry.size, self._seed, index + 1)
        local = self.shards.local_slice(vector, self.group.rank)
        return tf.cast(local, self.geometry.dtype)

    def spectrum(
        self, tridiagonal: Tridiagonal, matrices: Sequence[tf.Tensor]
    ) -> Spectrum:
        """Return the Ritz pairs of a tridiagonal matrix and the basis."""
        geometry = self.geometry
        pairs = ritz_pairs(tridiagonal, geometry.largest, geometry.smallest)
        values, weights = (tf.cast(x, geometry.dtype) for x in pairs)
        return Spectrum(values, combine(matrices, weights))

    def run(self, local: Product) -> Spectrum:
        """Run the whole estimation for a local operator."""
        iteration = self.iteration(local)
        return self.spectrum(*iteration.run(self.draw(-1), self.geometry.steps))


def estimation_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes that each of several replicas receives in an estimation."""
    item, steps = geometry.dtype.size, geometry.steps
    slices = geometry.slices(replicas).length * (replicas - 1)
    # One all-reduce for the start vector, two in each iteration to
    # orthogonalise (three only after a breakdown).
    sums = (1 + 2 * steps) * all_reduce_bytes((steps + 1) * item, replicas)
    # Each iteration gathers a vector and reduce-scatters its product.
    return 2 * steps * slices * item + sums
