"""Layouts: the part of the directions of a subspace that a worker keeps.

A vector may be in shards, of which every member of a group keeps a slice.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
from typing_extensions import override

from tfkfac.distributed.collectives import Communicator, all_reduce_bytes
from tfkfac.linalg.vectors import padded_size, row_products
from tfkfac.saving.entries import Region


class Shards:
    """Slices of equal length of a vector, by rank; the last end in zeros.

    If there is a single one, every rank has it. `padded` gives the length of a
    slice, from the least that is enough.
    """

    def __init__(
        self, size: int, count: int, padded: Callable[[int], int] = int
    ) -> None:
        self.size = size
        self.count = count
        self.length = padded(-(-size // count))

    def range(self, rank: int) -> slice:
        """The elements of a slice; may be none."""
        start = min(rank % self.count * self.length, self.size)
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
            start = rank % self.count * self.length
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


# From coefficients of the gradient to those of what is added to the weights.
Moves = Callable[[tf.Tensor], tf.Tensor]
# How far squares may be from adding up, of what they add up to; and where they
# may underflow.
_ROUNDING = 1e-2
_TINY = 1e-30


class Split(NamedTuple):
    """A gradient g, split."""

    inside: tf.Tensor  # the own coefficients `c = V^T g`
    rest: tf.Tensor  # `g - V c`
    sound: tf.Tensor  # whether V can be right, the same on all workers
    moved: tf.Tensor | None = None  # `V p`, if there are moves


def adds_up(whole: tf.Tensor, inside: tf.Tensor, rest: tf.Tensor) -> tf.Tensor:
    """True if `|g|^2 = |c|^2 + |g - V c|^2`, as for orthonormal directions.

    Others are not orthogonal, not of length 1 or not finite.
    """
    return tf.abs(whole - inside - square(rest)) <= _ROUNDING * whole + _TINY


def square(vector: tf.Tensor) -> tf.Tensor:
    """`|x|^2`, in one pass over x."""
    return 2 * tf.nn.l2_loss(vector)


def finite_or_nothing(change: tf.Tensor) -> tf.Tensor:
    """A change of the weights; none if it is not finite."""
    finite = tf.cast(tf.math.is_finite(square(change)), change.dtype)
    return tf.math.multiply_no_nan(change, finite)


def combinations(
    directions: tf.Tensor, inside: tf.Tensor, moves: Moves | None
) -> list[tf.Tensor]:
    """`V c` of coefficients c, then `V p` for moves p."""
    weights = [inside] if moves is None else [inside, moves(inside)]
    return tf.unstack(tf.matmul(tf.stack(weights), directions))


_NUMBERS = 2  # see `numbers_of`


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a subspace."""

    size: int  # number of weights, n
    largest: int  # number of directions of largest curvature, k
    smallest: int  # and of smallest curvature, l
    steps: int  # of Lanczos
    dtype: tf.DType  # of vectors

    @property
    def directions(self) -> int:
        """Number of directions, r."""
        return self.largest + self.smallest

    def slices(self, count: int) -> Shards:
        """The slices in which replicas divide a vector, for sums in chunks."""
        return Shards(self.size, count, padded_size)


class Layout(abc.ABC):
    """The part of the directions V that a worker keeps, as rows of V^T.

    Of some workers, each keeps a slice of the directions ("columns") and of
    their elements; "slices" are those of vectors that Lanczos leaves.
    """

    reduces_gradients: bool  # if `project_out` takes a worker's own gradient
    length: int  # of vectors, with zeros at the end, that spares copies
    # Bytes that a worker receives in the methods; `combine_bytes` for each of
    # the coefficients.
    coefficients_bytes: int
    combine_bytes: int
    arrangement_bytes: int

    def __init__(
        self,
        geometry: Geometry,
        workers: int,
        columns: Shards,
        elements: Shards,
    ) -> None:
        self.geometry = geometry
        self.workers = workers
        self.columns = columns
        self.elements = elements
        self.slices = geometry.slices(workers)
        self.item = int(geometry.dtype.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a worker's part of V^T."""
        return self.columns.length, self.elements.length

    def own(self, numbers: tf.Tensor, rank: int) -> tf.Tensor:
        """Those of r numbers that go with this worker's coefficients."""
        return self.columns.own(numbers, rank)

    def part(self, rank: int) -> tuple[slice, slice]:
        """The directions, and the elements of them, that a worker keeps."""
        return self.columns.range(rank), self.elements.range(rank)

    def regions(self, rank: int) -> tuple[Region, Region]:
        """Regions of a worker's part in V^T, and of its numbers among all r."""
        first, start = (part.start for part in self.part(rank))
        r, n = self.geometry.directions, self.geometry.size
        return Region((r, n), (first, start)), Region((r,), (first,))

    @abc.abstractmethod
    def project_out(
        self,
        directions: tf.Tensor,
        gradient: tf.Tensor,
        group: Communicator,
        moves: Moves | None = None,
        healthy: tf.Tensor | bool = True,
    ) -> Split:
        """Splits the gradient g into `c = V^T g` and `g - V c`.

        The own part of V^T is read twice. Moves take the own coefficients c to
        others p. What a worker has besides V is healthy if it can be right.
        """

    def coefficients(
        self, directions: tf.Tensor, vector: tf.Tensor, group: Communicator
    ) -> tf.Tensor:
        """`V^T x` of a vector that all workers have."""
        own = self.elements.own(vector, group.rank)
        return row_products(directions, own)

    @abc.abstractmethod
    def combine(
        self,
        directions: tf.Tensor,
        weights: Sequence[tf.Tensor],
        group: Communicator,
    ) -> tf.Tensor:
        """Sum of `V c` over some coefficients c, for all workers."""

    @abc.abstractmethod
    def arrange(self, rows: tf.Tensor, group: Communicator) -> tf.Tensor:
        """A worker's part, from the slices `(r, n / C)` Lanczos leaves."""

    @abc.abstractmethod
    def projection_bytes(self, moves: bool) -> int:
        """Bytes that a worker receives for the projections of a step.

        Those of `project_out` with moves, or without and then those of
        `coefficients` of the change, and of `combine` of two.
        """

    def reduce_bytes(self, count: int) -> int:
        """Bytes that a worker receives in a sum of some numbers."""
        return all_reduce_bytes(count * self.item, self.workers)


class RowsLayout(Layout):
    """A worker keeps the same elements of all directions, as Lanczos does.

    Products with V^T are sums of r numbers over the workers; products with V
    are gathered slices. The gradients are added up slice by slice, so that
    gathering the split gradient is the second half of their all-reduce.
    """

    def __init__(self, geometry: Geometry, workers: int) -> None:
        columns = Shards(geometry.directions, 1)
        super().__init__(geometry, workers, columns, geometry.slices(workers))
        self.reduces_gradients = workers > 1
        self.length = self.elements.whole
        self.coefficients_bytes = self.reduce_bytes(geometry.directions)
        # Whatever is combined.
        self.combine_bytes = self.elements.length * (workers - 1) * self.item
        self.arrangement_bytes = 0

    @override
    def project_out(
        self,
        directions: tf.Tensor,
        gradient: tf.Tensor,
        group: Communicator,
        moves: Moves | None = None,
        healthy: tf.Tensor | bool = True,
    ) -> Split:
        own = self.elements.reduce(gradient, group)
        inside, numbers = group.all_reduce(
            [row_products(directions, own), numbers_of(own, healthy)]
        )
        images = combinations(directions, inside, moves)
        images[0] = own - images[0]
        whole = self.elements.gather_all(images, group)
        rest, *moved = (x[: gradient.shape[0]] for x in whole)
        fits = adds_up(numbers[0], square(inside), rest)
        return Split(inside, rest, fits & tf.equal(numbers[1], 0), *moved)

    @override
    def coefficients(
        self, directions: tf.Tensor, vector: tf.Tensor, group: Communicator
    ) -> tf.Tensor:
        own = super().coefficients(directions, vector, group)
        (total,) = group.all_reduce([own])
        return total

    @override
    def combine(
        self,
        directions: tf.Tensor,
        weights: Sequence[tf.Tensor],
        group: Communicator,
    ) -> tf.Tensor:
        own = tf.matmul(tf.add_n(list(weights))[None], directions)[0]
        return self.elements.gather(own, group)

    @override
    def arrange(self, rows: tf.Tensor, group: Communicator) -> tf.Tensor:
        return rows

    @override
    def projection_bytes(self, moves: bool) -> int:
        sums = (2 - moves) * self.coefficients_bytes
        return self.combine_bytes + sums + self.reduce_bytes(_NUMBERS)


class ColumnsLayout(Layout):
    """A worker keeps whole directions, as published (DHO2, algorithm 3).

    Every product with V is a sum over the workers of vectors of length n.
    """

    def __init__(self, geometry: Geometry, workers: int) -> None:
        columns = Shards(geometry.directions, workers)
        super().__init__(geometry, workers, columns, geometry.slices(1))
        self.reduces_gradients = False
        self.length = geometry.size
        self.coefficients_bytes = 0
        self.combine_bytes = self.reduce_bytes(geometry.size)
        part = columns.length * self.slices.length
        self.arrangement_bytes = part * (workers - 1) * self.item

    @override
    def project_out(
        self,
        directions: tf.Tensor,
        gradient: tf.Tensor,
        group: Communicator,
        moves: Moves | None = None,
        healthy: tf.Tensor | bool = True,
    ) -> Split:
        inside = self.coefficients(directions, gradient, group)
        images = combinations(directions, inside, moves)
        cut, *moved, numbers = group.all_reduce(
            [
                *(self.elements.gather(x, group) for x in images),
                numbers_of(inside, healthy),
            ]
        )
        rest = gradient - cut
        fits = adds_up(square(gradient), numbers[0], rest)
        return Split(inside, rest, fits & tf.equal(numbers[1], 0), *moved)

    @override
    def combine(
        self,
        directions: tf.Tensor,
        weights: Sequence[tf.Tensor],
        group: Communicator,
    ) -> tf.Tensor:
        sums = []
        for one in weights:
            own = tf.matmul(one[None], directions)[0]
            sums += group.all_reduce([self.elements.gather(own, group)])
        return tf.add_n(sums)

    @override
    def arrange(self, rows: tf.Tensor, group: Communicator) -> tf.Tensor:
        """See `Layout.arrange`: the re-partition (DHO2, figure 4)."""
        if self.workers == 1:
            return rows
        by_owner = self.columns.own  # pads the last owner's directions
        parts = [
            tf.transpose(by_owner(tf.transpose(rows), owner))
            for owner in range(self.workers)
        ]
        received = group.all_to_all(tf.stack(parts))
        whole = tf.transpose(received, [1, 0, 2])
        flat = tf.reshape(whole, [self.columns.length, -1])
        return self.elements.own(flat[:, : self.geometry.size], 0)

    @override
    def projection_bytes(self, moves: bool) -> int:
        sums = (3 - moves) * self.combine_bytes
        return sums + self.reduce_bytes(_NUMBERS)


def numbers_of(part: tf.Tensor, healthy: tf.Tensor | bool) -> tf.Tensor:
    """Numbers that workers add up: a square, and how many are not healthy."""
    ill = tf.cast(tf.logical_not(healthy), part.dtype)
    return tf.stack([square(part), ill])


LAYOUTS: dict[str, Callable[[Geometry, int], Layout]] = {
    "rows": RowsLayout,
    "columns": ColumnsLayout,
}
