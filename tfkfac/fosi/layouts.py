"""Division of the matrix V of the directions among workers (layout)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.distributed.collectives import Communicator, all_reduce_bytes
from tfkfac.linalg.vectors import padded_size, row_products


class Shards:
    """Slices of equal length of a vector; the last slices end in zeros.

    Rank i has slice `i % count`.
    """

    def __init__(
        self, size: int, count: int, padded: Callable[[int], int] = int
    ) -> None:
        self.size = size
        self.count = count
        self.length = padded(-(-size // count))  # elements of a slice
        self.padded_size = self.count * self.length

    def local_range(self, rank: int) -> slice:
        """Return the range of a rank's slice, without padding; may be empty."""
        start = min(rank % self.count * self.length, self.size)
        return slice(start, min(start + self.length, self.size))

    def local_slice(self, vector: tf.Tensor, rank: int) -> tf.Tensor:
        """Return a rank's slices of vectors `(..., size or padded_size)`."""
        if vector.shape[-1] == self.padded_size:  # no copy
            start = rank % self.count * self.length
            return vector[..., start : start + self.length]
        values = vector[..., self.local_range(rank)]
        missing = self.length - values.shape[-1]
        padding = [[0, 0]] * (vector.shape.rank - 1) + [[0, missing]]
        return tf.pad(values, padding) if missing else values

    def gather(self, shard: tf.Tensor, communicator: Communicator) -> tf.Tensor:
        """All-gather a vector `(size,)` from the slices of all ranks."""
        (vector,) = self.gather_all([shard], communicator)
        return vector[: self.size]

    def gather_all(
        self, shards: Sequence[tf.Tensor], communicator: Communicator
    ) -> list[tf.Tensor]:
        """All-gather vectors `(padded_size,)` from the slices of all ranks."""
        if self.count == 1:
            return list(shards)
        gathered = communicator.all_gather(tf.stack(shards))
        return [tf.reshape(x, [-1]) for x in tf.unstack(gathered, axis=1)]

    def reduce(
        self, vector: tf.Tensor, communicator: Communicator
    ) -> tf.Tensor:
        """Sum a vector over all ranks; return the slice of this rank."""
        if self.count == 1:
            return self.local_slice(vector, 0)
        padding = self.padded_size - vector.shape[0]
        padded = tf.pad(vector, [[0, padding]]) if padding else vector
        return communicator.reduce_scatter(
            tf.reshape(padded, [self.count, self.length])
        )


# Function from coefficients `c = V^T g` to the coefficients p of a weight
# change `V p`.
SubspaceStep = Callable[[tf.Tensor], tf.Tensor]
# Relative and absolute tolerance of the check that V is orthonormal.
_ROUNDING = 1e-2
_TINY = 1e-30  # smaller squares may underflow
_NUM_CHECKS = 2  # elements of the all-reduced vector of checks
LAYOUTS = "rows", "columns"


class Split(NamedTuple):
    """Components of a gradient g along the directions V and outside of them."""

    coefficients: tf.Tensor  # local elements of `c = V^T g`
    remainder: tf.Tensor  # `g - V c`
    valid: tf.Tensor  # False if V is not orthonormal; equal on all workers
    step: tf.Tensor | None = None  # `V p` for a `SubspaceStep`


def square(vector: tf.Tensor) -> tf.Tensor:
    """`|x|^2`, in one pass over x."""
    return 2 * tf.nn.l2_loss(vector)


def zero_unless_finite(change: tf.Tensor) -> tf.Tensor:
    """Return a vector, or zeros if any element is not finite."""
    finite = tf.cast(tf.math.is_finite(square(change)), change.dtype)
    return tf.math.multiply_no_nan(change, finite)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a subspace of extreme curvature."""

    size: int  # number of weights, n
    largest: int  # number of directions of largest curvature, k
    smallest: int  # number of directions of smallest curvature, l
    steps: int  # Lanczos steps of an estimation
    dtype: tf.DType  # dtype of all vectors

    @property
    def directions(self) -> int:
        """Number of directions, r."""
        return self.largest + self.smallest

    def slices(self, count: int) -> Shards:
        """Divide vectors `(n,)` into slices, padded for sums in chunks."""
        return Shards(self.size, count, padded_size)


class Layout:
    """The block of V^T that each worker keeps.

    - "rows": a slice of every direction, like the Lanczos basis. Products with
      V^T all-reduce r numbers; products with V all-gather slices. `project_out`
      reduce-scatters the gradients, so gathering the remainder is the second
      half of their all-reduce.
    - "columns": whole directions, as published (DHO2, algorithm 3). Products
      with V all-reduce a vector of length n.
    """

    def __init__(self, name: str, geometry: Geometry, workers: int) -> None:
        self.by_rows = name == "rows"
        self.geometry = geometry
        self.workers = workers
        self.item = int(geometry.dtype.size)
        # Division of the directions (rows of V^T), of the elements of each
        # direction, and of the vectors that Lanczos returns.
        self.slices = geometry.slices(workers)
        self.columns = Shards(geometry.directions, workers)
        self.elements = geometry.slices(1)
        if self.by_rows:
            self.columns = Shards(geometry.directions, 1)
            self.elements = self.slices
        self.shape = self.columns.length, self.elements.length  # of a block
        # True if `project_out` sums local gradients.
        self.reduces_gradients = self.by_rows and workers > 1
        # Length of padded vectors, which are sliced without copies.
        self.length = geometry.size
        # Bytes that a worker receives in `coefficients`, in `combine` (per
        # vector for "columns") and in `arrange`.
        self.coefficients_bytes = self.arrangement_bytes = 0
        if self.by_rows:
            self.length = self.elements.padded_size
            self.coefficients_bytes = self._reduce_bytes(geometry.directions)
            combined = self.elements.length * (workers - 1)
            self.combine_bytes = combined * self.item
        else:
            self.combine_bytes = self._reduce_bytes(geometry.size)
            block = self.columns.length * self.slices.length
            self.arrangement_bytes = block * (workers - 1) * self.item

    def ranges(self, rank: int) -> tuple[slice, slice]:
        """Return the directions and the elements of a worker's block of V^T."""
        return self.columns.local_range(rank), self.elements.local_range(rank)

    def project_out(
        self,
        directions: tf.Tensor,
        gradient: tf.Tensor,
        group: Communicator,
        subspace_step: SubspaceStep | None = None,
        state_valid: tf.Tensor | bool = True,
    ) -> Split:
        """Split the gradient g into `c = V^T g` and `g - V c`.

        `gradient` is local if `reduces_gradients`, else the sum. The split is
        invalid on all workers if `state_valid` is False on any.
        """
        invalid = tf.cast(tf.logical_not(state_valid), gradient.dtype)

        def combinations(coefficients: tf.Tensor) -> list[tf.Tensor]:
            """Return local terms of `V c`, and of `V p` for a step."""
            weights = [coefficients]
            if subspace_step is not None:
                weights.append(subspace_step(coefficients))
            return tf.unstack(tf.matmul(tf.stack(weights), directions))

        if self.by_rows:
            local = self.elements.reduce(gradient, group)
            inner = row_products(directions, local)
            checks = tf.stack([square(local), invalid])
            coefficients, checks = group.all_reduce([inner, checks])
            images = combinations(coefficients)
            images[0] = local - images[0]
            gathered = self.elements.gather_all(images, group)
            remainder, *step = (x[: gradient.shape[0]] for x in gathered)
            g_square, c_square = checks[0], square(coefficients)
        else:
            coefficients = self.coefficients(directions, gradient, group)
            images = combinations(coefficients)
            whole = [self.elements.gather(x, group) for x in images]
            checks = tf.stack([square(coefficients), invalid])
            projection, *step, checks = group.all_reduce([*whole, checks])
            remainder = gradient - projection
            g_square, c_square = square(gradient), checks[0]
        # V may be orthonormal if `|g|^2 = |c|^2 + |g - V c|^2`.
        error = g_square - c_square - square(remainder)
        valid = tf.abs(error) <= _ROUNDING * g_square + _TINY
        valid &= tf.equal(checks[1], 0)
        return Split(coefficients, remainder, valid, *step)

    def coefficients(
        self, directions: tf.Tensor, vector: tf.Tensor, group: Communicator
    ) -> tf.Tensor:
        """Local elements of `V^T x` for a vector x that all workers have."""
        local = self.elements.local_slice(vector, group.rank)
        products = row_products(directions, local)
        if self.by_rows:
            (products,) = group.all_reduce([products])
        return products

    def combine(
        self,
        directions: tf.Tensor,
        weights: Sequence[tf.Tensor],
        group: Communicator,
    ) -> tf.Tensor:
        """Return, on all workers, `V sum_i c_i` for local vectors c_i."""
        if self.by_rows:
            local = tf.matmul(tf.add_n(list(weights))[None], directions)[0]
            return self.elements.gather(local, group)
        sums = []
        for coefficients in weights:
            local = tf.matmul(coefficients[None], directions)[0]
            sums += group.all_reduce([self.elements.gather(local, group)])
        return tf.add_n(sums)

    def arrange(self, rows: tf.Tensor, group: Communicator) -> tf.Tensor:
        """Return the local block of V^T, given Lanczos slices `(r, n / C)`.

        For "columns" this is the re-partition (DHO2, figure 4).
        """
        if self.by_rows or self.workers == 1:
            return rows
        blocks = [
            tf.transpose(self.columns.local_slice(tf.transpose(rows), owner))
            for owner in range(self.workers)
        ]
        received = group.all_to_all(tf.stack(blocks))
        by_direction = tf.transpose(received, [1, 0, 2])
        flat = tf.reshape(by_direction, [self.columns.length, -1])
        return self.elements.local_slice(flat[:, : self.geometry.size], 0)

    def projection_bytes(self, early_step: bool) -> int:
        """Bytes received in a step, with a subspace step if `early_step`."""
        if self.by_rows:
            sums = (2 - early_step) * self.coefficients_bytes
            return sums + self.combine_bytes + self._reduce_bytes(_NUM_CHECKS)
        # Include the Newton step's length, see `Subspace.clip_outlier`.
        checks = self._reduce_bytes(_NUM_CHECKS) + self._reduce_bytes(1)
        return (3 - early_step) * self.combine_bytes + checks

    def _reduce_bytes(self, count: int) -> int:
        """Bytes that a worker receives in an all-reduce of `count` numbers."""
        return all_reduce_bytes(count * self.item, self.workers)
