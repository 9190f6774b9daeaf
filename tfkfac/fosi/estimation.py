"""The Lanczos estimation of a model's extreme curvature."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.curvature.hessian import hessian_operator
from tfkfac.distributed.collectives import Communicator, differentiable_sum
from tfkfac.distributed.wire import all_reduce_bytes
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import (
    Lanczos,
    Product,
    Tridiagonal,
    combine,
    random_vector,
    ritz_pairs,
)
from tfkfac.loss.batch import LossBatch


class Spectrum(NamedTuple):
    """The result of an estimation.

    Attributes:
        values: Ritz values `(r,)`, ascending, the same bits on every worker;
            NaN if the estimation failed.
        rows: This worker's slices `(r, n / C)` of the Ritz vectors.
    """

    values: tf.Tensor
    rows: tf.Tensor


class Estimation:
    """The distributed Lanczos of one replica (DHO2, algorithm 2).

    Each replica keeps a slice of every row of the basis. The operator is the
    mean of the replicas' local Hessians, each by its share of the examples: a
    local one alone would not be the same on all, and not symmetric.

    Args:
        geometry: Sizes.
        group: The replicas that take part.
        seed: Seed of the start vector.
    """

    def __init__(
        self, geometry: Geometry, group: Communicator, seed: int
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.shards = geometry.slices(group.size)
        self._seed = seed

    def iteration(self, local: Product) -> Lanczos:
        """Returns the iteration for the sum of local operators.

        Args:
            local: Product of a flat vector with the local Hessian, weighted.
        """
        group = self.group

        def product(row: tf.Tensor) -> tf.Tensor:
            image = local(self.shards.gather(row, group))
            return self.shards.reduce(image, group)

        return Lanczos(product, self.geometry.size, self.draw, self.sum)

    def sum(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sum over the group of numbers, up to one more than steps."""
        if self.group.size == 1:
            return numbers
        # A collective wants a fixed shape, and rows come in.
        count, most = tf.size(numbers), self.geometry.steps + 1
        padded = tf.pad(numbers, [[0, most - count]])
        (total,) = self.group.all_reduce([tf.ensure_shape(padded, [most])])
        return total[:count]

    def differentiable_sum(self, vector: tf.Tensor) -> tf.Tensor:
        """Sum over the group, differentiable any number of times."""
        return differentiable_sum(self.group, vector)

    def start(self) -> tf.Tensor:
        """Returns the slice of the start vector."""
        return self.draw(tf.constant(-1))

    def draw(self, index: tf.Tensor) -> tf.Tensor:
        """Returns the slice of a random vector with norm of about 1."""
        vector = random_vector(self.geometry.size, self._seed, index + 1)
        own = self.shards.own(vector, self.group.rank)
        return tf.cast(own, self.geometry.dtype)

    def spectrum(
        self, tridiagonal: Tridiagonal, matrices: Sequence[tf.Tensor]
    ) -> Spectrum:
        """Returns the Ritz pairs.

        Args:
            tridiagonal: What the iterations made.
            matrices: The rows of the basis (slices).
        """
        geometry = self.geometry
        pairs = ritz_pairs(tridiagonal, geometry.largest, geometry.smallest)
        weights = tf.cast(pairs.weights, geometry.dtype)
        return Spectrum(
            tf.cast(pairs.values, geometry.dtype),
            combine(matrices, weights),
        )

    def run(self, local: Product) -> Spectrum:
        """Does the whole estimation."""
        iteration = self.iteration(local)
        made = iteration.run(self.start(), self.geometry.steps)
        return self.spectrum(*made)


def local_hessian(
    model: keras.Model,
    batch: LossBatch,
    call: ForwardCall,
    estimation: Estimation,
    shares: Sequence[tf.Tensor],
) -> Product:
    """The Hessian of the current batch's loss at the current weights.

    The loss is weighted by this replica's shares before it is differentiated:
    through synchronised layers the Hessian has parts of other losses.
    """
    variables = model.trainable_variables
    return hessian_operator(
        model,
        call,
        dict(batch.arguments),
        variables,
        [tf.identity(v.value) for v in variables],
        estimation.differentiable_sum,
        shares,
    )


def basis_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes of the basis that each of some replicas has in an estimation."""
    length = geometry.slices(replicas).length
    return geometry.steps * length * geometry.dtype.size


def estimation_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes that each of some replicas receives for an estimation."""
    item, steps = geometry.dtype.size, geometry.steps
    slices = geometry.slices(replicas).length * (replicas - 1)
    # For the start, and twice for the orthogonalisation of each iteration (a
    # third time only where a Krylov space is exhausted).
    sums = (1 + 2 * steps) * all_reduce_bytes((steps + 1) * item, replicas)
    # A row is gathered and its product reduced to slices.
    return 2 * steps * slices * item + sums
