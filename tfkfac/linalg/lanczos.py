"""The Lanczos iteration with full reorthogonalisation.

Vectors may be spread over devices in shards: whatever is summed over their
elements goes through `reduce`, which adds up the shares of all devices. The
tridiagonal matrix then has the same bits everywhere.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import called_often
from tfkfac.linalg.symmetric import rounding

Product = Callable[[tf.Tensor], tf.Tensor]

# Rows of the basis are copied once, when a block of so many is full.
BLOCK_ROWS = 8


class Basis:
    """Rows of equal length, of which more come in."""

    def __init__(self) -> None:
        self._blocks: list[tf.Tensor] = []
        self._rows: list[tf.Tensor] = []

    def add(self, row: tf.Tensor) -> list[tf.Tensor]:
        """Adds a row and returns all, as matrices."""
        self._rows.append(row)
        return self.matrices()

    def matrices(self) -> list[tf.Tensor]:
        """Returns the rows, as matrices of up to `BLOCK_ROWS` of them."""
        if len(self._rows) == BLOCK_ROWS:
            self._blocks.append(tf.stack(self._rows))
            self._rows = []
        loose = [tf.stack(self._rows)] if self._rows else []
        return [*self._blocks, *loose]


def coefficients(matrices: Sequence[tf.Tensor], vector: tf.Tensor) -> tf.Tensor:
    """Products of rows with a vector of their length."""
    column = vector[:, None]
    return tf.concat([tf.matmul(m, column) for m in matrices], 0)[:, 0]


def combine(matrices: Sequence[tf.Tensor], weights: tf.Tensor) -> tf.Tensor:
    """Sums of rows times weights `(k, rows)`."""
    return tf.add_n(_terms(matrices, weights))


def project_out(
    matrices: Sequence[tf.Tensor], weights: tf.Tensor, vector: tf.Tensor
) -> tf.Tensor:
    """A vector less its components: the sum of rows times weights."""
    terms = _terms(matrices, -weights[None])
    return tf.add_n([vector[None], *terms])[0]


def _terms(
    matrices: Sequence[tf.Tensor], weights: tf.Tensor
) -> list[tf.Tensor]:
    parts = tf.split(weights, [m.shape[0] for m in matrices], axis=1)
    return [tf.matmul(w, m) for m, w in zip(matrices, parts, strict=True)]


class Candidate(NamedTuple):
    """What the next row of the basis is made of.

    Attributes:
        vector: A vector orthogonal to all rows; a raw one if `fresh`.
        length: Its norm.
        fresh: Whether it begins anew after a breakdown.
        scale: Largest element of the tridiagonal so far.
        rows: Number of rows that are not zero so far.
    """

    vector: tf.Tensor
    length: tf.Tensor
    fresh: tf.Tensor
    scale: tf.Tensor
    rows: tf.Tensor


class TridiagonalRow(NamedTuple):
    """What one iteration adds to the tridiagonal matrix.

    Attributes:
        diagonal: Element of the diagonal.
        coupling: The one between this row and the next.
        kept: Whether the row counts; a row of zeros does not.
    """

    diagonal: tf.Tensor
    coupling: tf.Tensor
    kept: tf.Tensor


class Lanczos:
    """The iteration for one symmetric operator.

    The vectors are orthogonalised twice against all rows (once loses
    orthogonality in float32). When the Krylov space of the start vector is
    exhausted (the operator is zero, of low rank, or has repeated
    eigenvalues), an iteration is spent on a random vector from which it goes
    on: no row is ever the noise of a division by almost zero.

    Args:
        product: Multiplies a vector (a shard) by the operator.
        size: Size of the operator.
        draw: Returns the shard of a random vector with norm of about 1, for
            the number of an iteration.
        reduce: Adds up over all devices.
    """

    def __init__(
        self,
        product: Product,
        size: int,
        draw: Callable[[tf.Tensor], tf.Tensor],
        reduce: Product = tf.identity,
    ) -> None:
        self._product = product
        self._size = size
        self._draw = draw
        self._reduce = reduce
        self._begin = called_often(self._multiply)
        self._end = called_often(self._judge)

    def start(self, vector: tf.Tensor) -> Candidate:
        """Returns the first candidate, for a start vector (a shard)."""
        square = self._reduce(2 * tf.nn.l2_loss(vector)[None])[0]
        usable = (square > 0) & tf.math.is_finite(square)
        first = tf.constant(0)
        vector = tf.cond(usable, lambda: vector, lambda: self._draw(first))
        length = tf.where(usable, tf.sqrt(square), tf.ones_like(square))
        return Candidate(vector, length, ~usable, tf.zeros_like(square), first)

    def iterate(
        self,
        add: Callable[[tf.Tensor], Sequence[tf.Tensor]],
        candidate: Candidate,
        index: tf.Tensor,
    ) -> tuple[TridiagonalRow, Candidate]:
        """Does one iteration.

        Args:
            add: Adds a row to the basis and returns all rows, as matrices;
                rows of zeros may follow.
            candidate: What the row is made of.
            index: Number of the iteration.
        """
        row, image = self._begin(candidate)
        matrices = add(row)
        first = self._reduce(coefficients(matrices, image))
        image = project_out(matrices, first, image)
        square = 2 * tf.nn.l2_loss(image)
        again = tf.concat([coefficients(matrices, image), square[None]], 0)
        again = self._reduce(again)
        second, square = again[:-1], again[-1]
        image = project_out(matrices, second, image)
        removed = tf.reduce_sum(second * second)
        diagonal = first[index] + second[index]
        coupling, following = self._end(
            candidate, image, square, removed, diagonal, index
        )
        kept = ~candidate.fresh
        return TridiagonalRow(diagonal, coupling, kept), following

    def _multiply(self, candidate: Candidate) -> tuple[tf.Tensor, tf.Tensor]:
        """The row of a candidate, and its product or what takes its place."""
        vector, length, fresh = candidate[:3]
        row = vector * tf.where(fresh, tf.zeros_like(length), 1 / length)
        image = self._product(row)
        return row, tf.cond(fresh, lambda: vector, lambda: image)

    def _judge(
        self,
        candidate: Candidate,
        image: tf.Tensor,
        square: tf.Tensor,
        removed: tf.Tensor,
        diagonal: tf.Tensor,
        index: tf.Tensor,
    ) -> tuple[tf.Tensor, Candidate]:
        """Returns the coupling to the next row, and its candidate.

        Args:
            candidate: The one of this row.
            image: Its product, orthogonal to all rows.
            square: Squared norm of the product after the first pass.
            removed: Squared norm of what the second pass took away.
            diagonal: Element of the tridiagonal matrix.
            index: Number of the iteration.
        """
        fresh = candidate.fresh
        length = tf.sqrt(tf.maximum(square - removed, 0))
        one, zero = tf.ones_like(length), tf.zeros_like(length)
        rows = candidate.rows + tf.cast(~fresh, tf.int32)
        largest = tf.where(fresh, zero, tf.maximum(abs(diagonal), length))
        scale = tf.maximum(candidate.scale, largest)
        noise = 10 * rounding(image.dtype) * tf.where(fresh, one, scale)
        # Twice is enough (Kahan): what the second pass still shortens by much
        # lies in the space of the rows.
        broken = (length <= noise) | (2 * removed > square)
        broken |= rows >= self._size
        broken &= tf.math.is_finite(square)
        coupling = tf.where(broken | fresh, zero, length)
        vector = tf.cond(broken, lambda: self._draw(index + 1), lambda: image)
        length = tf.where(broken, one, length)
        return coupling, Candidate(vector, length, broken, scale, rows)

    def run(
        self, vector: tf.Tensor, steps: int
    ) -> tuple[list[TridiagonalRow], Basis]:
        """Does all iterations from a start vector (a shard)."""
        basis, made = Basis(), []
        candidate = self.start(vector)
        for index in range(steps):
            step, candidate = self.iterate(
                basis.add, candidate, tf.constant(index)
            )
            made.append(step)
        return made, basis


class RitzPairs(NamedTuple):
    """The ends of the spectrum.

    Attributes:
        values: Ritz values `(r,)` in float64, ascending.
        weights: Ritz vectors `(r, steps)` in the basis, in float64.

    Value and weights of pairs that do not exist, because the iteration found
    fewer, are zero.
    """

    values: tf.Tensor
    weights: tf.Tensor


def ritz_pairs(
    diagonal: tf.Tensor,
    coupling: tf.Tensor,
    kept: tf.Tensor,
    num_largest: int,
    num_smallest: int,
) -> RitzPairs:
    """Decomposes the tridiagonal matrix.

    Args:
        diagonal: `(steps,)`.
        coupling: `(steps,)`; the last element couples to nothing.
        kept: `(steps,)`, whether a row counts.
        num_largest: Number of pairs from the upper end.
        num_smallest: Number of pairs from the lower end.
    """
    diagonal = tf.cast(diagonal, tf.float64)
    coupling = tf.cast(coupling[:-1], tf.float64)
    numbers = tf.concat([diagonal, coupling], 0)
    finite = tf.reduce_all(tf.math.is_finite(numbers))
    # Rows that do not count get an eigenvalue above all others.
    bound = 1 + 4 * tf.reduce_max(tf.abs(numbers))
    full = tf.where(kept, diagonal, bound)
    matrix = tf.linalg.diag(full)
    if coupling.shape[0]:
        matrix += tf.linalg.diag(coupling, k=1) + tf.linalg.diag(coupling, k=-1)
    # TensorFlow's CPU kernel raises on a matrix that is not finite.
    values, vectors = tf.linalg.eigh(
        tf.where(finite, matrix, tf.zeros_like(matrix))
    )
    count = tf.reduce_sum(tf.cast(kept, tf.int32))
    low, high = tf.range(num_smallest), count - 1 - tf.range(num_largest)
    index = tf.concat([low, high], 0)
    valid = tf.concat([low < count - num_largest, high >= 0], 0)
    index = tf.where(valid, index, 0)
    nan = tf.constant(float("nan"), tf.float64)
    values = tf.where(valid, tf.gather(values, index), 0)
    order = tf.argsort(values)
    weights = tf.transpose(tf.gather(vectors, index, axis=1))
    weights = tf.where(valid[:, None], weights, 0)
    return RitzPairs(
        tf.where(finite, tf.gather(values, order), nan),
        tf.gather(weights, order),
    )


def stack_rows(
    rows: Sequence[TridiagonalRow],
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns diagonal, coupling and marks of the rows that count."""
    return (
        tf.stack([row.diagonal for row in rows]),
        tf.stack([row.coupling for row in rows]),
        tf.stack([row.kept for row in rows]),
    )


def random_vector(size: int, seed: int, index: int | tf.Tensor) -> tf.Tensor:
    """A random vector with norm of about 1, the same on every device."""
    vector = tf.random.stateless_normal([size], [seed, index])
    return vector / tf.sqrt(tf.cast(size, vector.dtype))


def default_steps(size: int, pairs: int) -> int:
    """Steps for `pairs` Ritz pairs: `min(n, max(4 r, 2 ln n))` (FOSI)."""
    logarithm = math.ceil(2 * math.log(max(size, 2)))
    return min(size, max(4 * pairs, logarithm))
