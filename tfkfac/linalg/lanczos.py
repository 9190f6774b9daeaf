"""The Lanczos iteration with full reorthogonalisation, and its Ritz pairs.

Vectors may be spread over devices in shards: whatever is summed over their
elements goes through `reduce`, which adds up the shares of all devices. The
tridiagonal matrix then has the same bits everywhere.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import in_xla, new_rows, repeat, set_row
from tfkfac.linalg.tensors import rounding
from tfkfac.linalg.vectors import row_products

Product = Callable[[tf.Tensor], tf.Tensor]

# Rows of an eager basis are copied once, when a block of so many is full.
_BLOCK_ROWS = 8


def coefficients(matrices: Sequence[tf.Tensor], vector: tf.Tensor) -> tf.Tensor:
    """Products of rows with a vector of their length."""
    return tf.concat([row_products(m, vector) for m in matrices], 0)


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
    parts = tf.split(weights, [tf.shape(m)[0] for m in matrices], axis=1)
    return [tf.matmul(w, m) for m, w in zip(matrices, parts, strict=True)]


class Basis(NamedTuple):
    """All rows of a basis so far, in matrices one below the other."""

    matrices: Sequence[tf.Tensor]
    previous: tf.Tensor  # the row before the last


class Residual(NamedTuple):
    """A vector after its components along all rows were removed."""

    image: tf.Tensor
    square: tf.Tensor  # its squared norm
    is_short: tf.Tensor  # if that is less than half of what it was before
    along: tf.Tensor  # the component along the last row


class Candidate(NamedTuple):
    """The next row of the basis, before it is normalised.

    It is orthogonal to all rows, but for one that begins anew after a
    breakdown.
    """

    vector: tf.Tensor
    length: tf.Tensor
    fresh: tf.Tensor  # if it begins anew
    scale: tf.Tensor  # largest element of the tridiagonal so far
    rows: tf.Tensor  # number of rows that are not zero so far


class Tridiagonal(NamedTuple):
    """The tridiagonal matrix, or the elements that one iteration adds."""

    diagonal: tf.Tensor
    coupling: tf.Tensor  # between a row and the next
    kept: tf.Tensor  # if a row counts; a row of zeros does not


class Krylov(NamedTuple):
    """State of the iteration between two rows, for a number of steps."""

    basis: tf.Tensor  # rows `(steps, length)`; those to come are zero
    tridiagonal: Tridiagonal
    candidate: Candidate


class Lanczos:
    """The iteration for one symmetric operator.

    A product is made orthogonal to the last two rows, in which almost all of
    it lies, and then to all rows. Without the first, rounding in float32 would
    need the second twice; so only where it shortens a vector by much it is
    done once more. When the Krylov space of the start vector is exhausted (the
    operator is zero, of low rank, or has repeated eigenvalues), an iteration
    is spent on a random vector from which it goes on: no row is ever the noise
    of a division by almost zero.

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

    def run(
        self, vector: tf.Tensor, steps: int
    ) -> tuple[Tridiagonal, list[tf.Tensor]]:
        """Does all iterations from a start vector (a shard).

        The rows of the basis are in matrices.
        """
        if tf.executing_eagerly():
            return self._run_eagerly(vector, steps)
        state = self.advance(self.begin(vector, steps), 0, steps)
        return state.tridiagonal, [state.basis]

    def begin(self, vector: tf.Tensor, steps: int) -> Krylov:
        """State before the first iteration, for a start vector (a shard)."""
        numbers = tf.zeros([steps], vector.dtype)
        return Krylov(
            new_rows(steps, vector.shape[0], vector.dtype),
            Tridiagonal(numbers, numbers, tf.zeros([steps], tf.bool)),
            self.start(vector),
        )

    def advance(
        self, state: Krylov, first: int | tf.Tensor, end: int | tf.Tensor
    ) -> Krylov:
        """Does the iterations from number `first` up to `end`, in a graph."""

        def iterate(index: tf.Tensor, state: Krylov) -> Krylov:
            place = tf.range(state.basis.shape[0]) == index
            added: list[tf.Tensor] = []

            def add(row: tf.Tensor) -> Basis:
                basis = set_row(state.basis, index, row)
                added.append(basis)
                # XLA wants a fixed shape: rows of zeros add nothing.
                rows = basis if in_xla() else basis[: index + 1]
                return Basis([rows], basis[tf.maximum(index - 1, 0)])

            new, candidate = self.iterate(add, state.candidate, index)
            numbers = [
                tf.where(place, number, vector)
                for number, vector in zip(new, state.tridiagonal, strict=True)
            ]
            return Krylov(added[0], Tridiagonal(*numbers), candidate)

        return repeat(iterate, state, first, end)

    def _run_eagerly(
        self, vector: tf.Tensor, steps: int
    ) -> tuple[Tridiagonal, list[tf.Tensor]]:
        """Does as `run`, where each change of a matrix would copy it."""
        blocks: list[tf.Tensor] = []
        rows: list[tf.Tensor] = []

        def add(row: tf.Tensor) -> Basis:
            previous = rows[-1] if rows else row
            if len(rows) == _BLOCK_ROWS:
                blocks.append(tf.stack(rows))
                rows.clear()
            rows.append(row)
            return Basis([*blocks, tf.stack(rows)], previous)

        candidate, made = self.start(vector), []
        for index in range(steps):
            new, candidate = self.iterate(add, candidate, tf.constant(index))
            made.append(new)
        numbers = [tf.stack(values) for values in zip(*made, strict=True)]
        return Tridiagonal(*numbers), [*blocks, tf.stack(rows)]

    def start(self, vector: tf.Tensor) -> Candidate:
        """First candidate, for a start vector (a shard)."""
        square = self._reduce(2 * tf.nn.l2_loss(vector)[None])[0]
        usable = (square > 0) & tf.math.is_finite(square)
        first = tf.constant(0)
        vector = tf.cond(usable, lambda: vector, lambda: self._draw(first))
        length = tf.where(usable, tf.sqrt(square), tf.ones_like(square))
        return Candidate(vector, length, ~usable, tf.zeros_like(square), first)

    def iterate(
        self,
        add: Callable[[tf.Tensor], Basis],
        candidate: Candidate,
        index: tf.Tensor,
    ) -> tuple[Tridiagonal, Candidate]:
        """Does one iteration.

        `add` adds a row to the basis and returns all; zeros may follow.
        """
        row, image = self._multiply(candidate)
        matrices, previous = add(row)
        # A first row has none before it, and a fresh one is not coupled to it.
        single = candidate.fresh | tf.equal(index, 0)
        before = tf.where(single, 0 * candidate.length, candidate.length)
        image -= before * previous
        along = self._reduce(coefficients([row[None]], image))[0]
        residual = self._project_out(matrices, image - along * row, index)
        # Twice is enough (Kahan): what the second pass still shortens by much
        # lies in the space of the rows.
        residual = tf.cond(
            residual.is_short,
            lambda: self._project_out(
                matrices, residual.image, index, residual.along
            ),
            lambda: residual,
        )
        diagonal = along + residual.along
        coupling, following = self._judge(candidate, residual, diagonal, index)
        kept = ~candidate.fresh
        return Tridiagonal(diagonal, coupling, kept), following

    def _project_out(
        self,
        matrices: Sequence[tf.Tensor],
        image: tf.Tensor,
        index: tf.Tensor,
        along: float | tf.Tensor = 0.0,
    ) -> Residual:
        """Removes all components; `along` went along row `index` before."""
        square = 2 * tf.nn.l2_loss(image)
        found = tf.concat([coefficients(matrices, image), square[None]], 0)
        found = self._reduce(found)
        inside, square = found[:-1], found[-1]
        removed = tf.reduce_sum(inside * inside)
        return Residual(
            project_out(matrices, inside, image),
            square - removed,
            2 * removed > square,
            along + inside[index],
        )

    def _multiply(self, candidate: Candidate) -> tuple[tf.Tensor, tf.Tensor]:
        """Row of a candidate, and its product; a fresh one is its own."""
        vector, length, fresh = candidate[:3]
        row = vector * tf.where(fresh, tf.zeros_like(length), 1 / length)
        image = self._product(row)
        return row, tf.cond(fresh, lambda: vector, lambda: image)

    def _judge(
        self,
        candidate: Candidate,
        residual: Residual,
        diagonal: tf.Tensor,
        index: tf.Tensor,
    ) -> tuple[tf.Tensor, Candidate]:
        """Coupling to the next row, and its candidate."""
        fresh = candidate.fresh
        length = tf.sqrt(tf.maximum(residual.square, 0))
        one, zero = tf.ones_like(length), tf.zeros_like(length)
        rows = candidate.rows + tf.cast(~fresh, tf.int32)
        largest = tf.where(fresh, zero, tf.maximum(abs(diagonal), length))
        scale = tf.maximum(candidate.scale, largest)
        noise = 10 * rounding(length.dtype) * tf.where(fresh, one, scale)
        broken = (length <= noise) | residual.is_short
        broken |= rows >= self._size
        broken &= tf.math.is_finite(residual.square)
        coupling = tf.where(broken | fresh, zero, length)
        vector = tf.cond(
            broken, lambda: self._draw(index + 1), lambda: residual.image
        )
        length = tf.where(broken, one, length)
        return coupling, Candidate(vector, length, broken, scale, rows)


def random_vector(size: int, seed: int, index: int | tf.Tensor) -> tf.Tensor:
    """A random vector with norm of about 1, the same on every device."""
    vector = tf.random.stateless_normal([size], [seed, index])
    return vector / tf.sqrt(tf.cast(size, vector.dtype))


def default_steps(size: int, pairs: int) -> int:
    """Steps for `pairs` Ritz pairs: `min(n, max(4 r, 2 ln n))` (FOSI)."""
    logarithm = math.ceil(2 * math.log(max(size, 2)))
    return min(size, max(4 * pairs, logarithm))


class RitzPairs(NamedTuple):
    """Ritz pairs of the ends of a spectrum, in float64.

    Value and weights of pairs that do not exist, because the iteration found
    fewer, are zero.
    """

    values: tf.Tensor  # `(r,)`, ascending
    weights: tf.Tensor  # `(r, steps)`, the vectors in the basis


def ritz_pairs(
    tridiagonal: Tridiagonal, num_largest: int, num_smallest: int
) -> RitzPairs:
    """Ritz pairs from both ends of a matrix whose last row is not coupled."""
    diagonal = tf.cast(tridiagonal.diagonal, tf.float64)
    coupling = tf.cast(tridiagonal.coupling[:-1], tf.float64)
    kept = tridiagonal.kept
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
