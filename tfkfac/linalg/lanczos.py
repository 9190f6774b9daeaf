"""The Lanczos iteration with full reorthogonalisation.

Vectors may be spread over devices in shards: whatever is summed over their
elements goes through `reduce`, which adds up the shares of all devices. The
tridiagonal matrix then has the same bits everywhere.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import in_xla, repeat
from tfkfac.compat.variables import new_rows, set_row
from tfkfac.linalg.sums import row_products
from tfkfac.linalg.symmetric import rounding

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


class Rows(NamedTuple):
    """The rows of a basis so far.

    Attributes:
        matrices: All of them, one below the other.
        previous: The row before the last.
    """

    matrices: Sequence[tf.Tensor]
    previous: tf.Tensor


class Rest(NamedTuple):
    """What is left of a vector that was made orthogonal to all rows.

    Attributes:
        image: The vector.
        square: Its squared norm.
        is_short: Whether that is less than half of what it was before.
        along: What was removed along the last row.
    """

    image: tf.Tensor
    square: tf.Tensor
    is_short: tf.Tensor
    along: tf.Tensor


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


class Tridiagonal(NamedTuple):
    """The tridiagonal matrix, or what one iteration adds to it.

    Attributes:
        diagonal: Elements of the diagonal.
        coupling: Those between a row and the next.
        kept: Whether a row counts; a row of zeros does not.
    """

    diagonal: tf.Tensor
    coupling: tf.Tensor
    kept: tf.Tensor


class Krylov(NamedTuple):
    """What there is after some of the iterations.

    Attributes:
        basis: Rows `(steps, length)`; those to come are zero.
        tridiagonal: Vectors `(steps,)`.
        candidate: What the next row is made of.
    """

    basis: tf.Tensor
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
        """Does all iterations.

        Args:
            vector: Start vector (a shard).
            steps: Number of iterations.

        Returns:
            The tridiagonal matrix, and the rows of the basis in matrices.
        """
        if tf.executing_eagerly():
            return self._run_eagerly(vector, steps)
        state = self.advance(self.begin(vector, steps), 0, steps)
        return state.tridiagonal, [state.basis]

    def begin(self, vector: tf.Tensor, steps: int) -> Krylov:
        """Returns what there is before the first iteration."""
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

            def add(row: tf.Tensor) -> Rows:
                basis = set_row(state.basis, index, row)
                added.append(basis)
                # XLA wants a fixed shape: rows of zeros add nothing.
                rows = basis if in_xla() else basis[: index + 1]
                return Rows([rows], basis[tf.maximum(index - 1, 0)])

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
        """Like `run`. Outside of graphs a change of a matrix copies it."""
        blocks: list[tf.Tensor] = []
        rows: list[tf.Tensor] = []

        def add(row: tf.Tensor) -> Rows:
            previous = rows[-1] if rows else row
            if len(rows) == _BLOCK_ROWS:
                blocks.append(tf.stack(rows))
                rows.clear()
            rows.append(row)
            return Rows([*blocks, tf.stack(rows)], previous)

        candidate, made = self.start(vector), []
        for index in range(steps):
            new, candidate = self.iterate(add, candidate, tf.constant(index))
            made.append(new)
        numbers = [tf.stack(values) for values in zip(*made, strict=True)]
        return Tridiagonal(*numbers), [*blocks, tf.stack(rows)]

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
        add: Callable[[tf.Tensor], Rows],
        candidate: Candidate,
        index: tf.Tensor,
    ) -> tuple[Tridiagonal, Candidate]:
        """Does one iteration.

        Args:
            add: Adds a row to the basis and returns all rows; rows of zeros
                may follow.
            candidate: What the row is made of.
            index: Number of the iteration.
        """
        row, image = self._multiply(candidate)
        matrices, previous = add(row)
        # A first row has none before it, and a fresh one is not coupled to it.
        single = candidate.fresh | tf.equal(index, 0)
        before = tf.where(single, 0 * candidate.length, candidate.length)
        image -= before * previous
        along = self._reduce(coefficients([row[None]], image))[0]
        rest = self._project_out(matrices, image - along * row, index)
        # Twice is enough (Kahan): what the second pass still shortens by much
        # lies in the space of the rows.
        rest = tf.cond(
            rest.is_short,
            lambda: self._project_out(matrices, rest.image, index, rest.along),
            lambda: rest,
        )
        diagonal = along + rest.along
        coupling, following = self._judge(candidate, rest, diagonal, index)
        kept = ~candidate.fresh
        return Tridiagonal(diagonal, coupling, kept), following

    def _project_out(
        self,
        matrices: Sequence[tf.Tensor],
        image: tf.Tensor,
        index: tf.Tensor,
        along: float | tf.Tensor = 0.0,
    ) -> Rest:
        """Makes a vector orthogonal to all rows.

        Args:
            matrices: The rows.
            image: The vector.
            index: Number of the last row.
            along: What has been removed along it before.
        """
        square = 2 * tf.nn.l2_loss(image)
        found = tf.concat([coefficients(matrices, image), square[None]], 0)
        found = self._reduce(found)
        inside, square = found[:-1], found[-1]
        removed = tf.reduce_sum(inside * inside)
        return Rest(
            project_out(matrices, inside, image),
            square - removed,
            2 * removed > square,
            along + inside[index],
        )

    def _multiply(self, candidate: Candidate) -> tuple[tf.Tensor, tf.Tensor]:
        """The row of a candidate, and its product or what takes its place."""
        vector, length, fresh = candidate[:3]
        row = vector * tf.where(fresh, tf.zeros_like(length), 1 / length)
        image = self._product(row)
        return row, tf.cond(fresh, lambda: vector, lambda: image)

    def _judge(
        self,
        candidate: Candidate,
        rest: Rest,
        diagonal: tf.Tensor,
        index: tf.Tensor,
    ) -> tuple[tf.Tensor, Candidate]:
        """Returns the coupling to the next row, and its candidate.

        Args:
            candidate: The one of this row.
            rest: What is left of its product.
            diagonal: Element of the tridiagonal matrix.
            index: Number of the iteration.
        """
        fresh = candidate.fresh
        length = tf.sqrt(tf.maximum(rest.square, 0))
        one, zero = tf.ones_like(length), tf.zeros_like(length)
        rows = candidate.rows + tf.cast(~fresh, tf.int32)
        largest = tf.where(fresh, zero, tf.maximum(abs(diagonal), length))
        scale = tf.maximum(candidate.scale, largest)
        noise = 10 * rounding(length.dtype) * tf.where(fresh, one, scale)
        broken = (length <= noise) | rest.is_short
        broken |= rows >= self._size
        broken &= tf.math.is_finite(rest.square)
        coupling = tf.where(broken | fresh, zero, length)
        vector = tf.cond(
            broken, lambda: self._draw(index + 1), lambda: rest.image
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
