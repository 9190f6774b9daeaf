"""Lanczos iteration with full reorthogonalisation, and Ritz pairs.

Vectors may be sharded over devices. The tridiagonal matrix is bitwise equal on
all devices.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import in_xla, new_rows, repeat, set_row
from tfkfac.linalg.tensors import nan_unless, rounding
from tfkfac.linalg.vectors import row_products

Product = Callable[[tf.Tensor], tf.Tensor]


class Residual(NamedTuple):
    """Vector after the subtraction of its components along all basis rows."""

    image: tf.Tensor
    square: tf.Tensor  # Squared norm.
    is_short: tf.Tensor  # True if the squared norm was more than halved.
    last_component: tf.Tensor  # Subtracted component along the last row.


class Candidate(NamedTuple):
    """Next basis row before normalisation."""

    vector: tf.Tensor  # Orthogonal to all rows, unless fresh.
    length: tf.Tensor
    fresh: tf.Tensor  # True for a random vector after a breakdown.
    scale: tf.Tensor  # Largest element of the tridiagonal matrix so far.
    rows: tf.Tensor  # Number of nonzero rows so far.


class Tridiagonal(NamedTuple):
    """Elements of the tridiagonal matrix."""

    diagonal: tf.Tensor
    coupling: tf.Tensor  # Off-diagonal element between a row and the next.
    kept: tf.Tensor  # False for a row of zeros.


class Krylov(NamedTuple):
    """State of the Lanczos iteration, with memory for all basis rows."""

    basis: tf.Tensor  # rows `(steps, length)`; zero if not computed yet
    tridiagonal: Tridiagonal
    candidate: Candidate


@dataclasses.dataclass(frozen=True)
class Lanczos:
    """Lanczos iteration for a symmetric operator.

    Each product is orthogonalised against the last two rows, which have almost
    all of its components, and then against all rows. Without the first part,
    float32 would always need a second pass over all rows.

    The Krylov space of the start vector is exhausted early if the operator is
    zero, has low rank or repeated eigenvalues (a breakdown). The iteration then
    continues from a random vector, so that no row is rounding noise.
    """

    product: Product  # multiplies a vector (shard) by the operator
    size: int
    # Random vector (shard) of norm about 1, by the index of an iteration.
    draw: Callable[[tf.Tensor], tf.Tensor]
    reduce: Product = tf.identity  # sum over all devices

    def run(self, vector: tf.Tensor, steps: int) -> Krylov:
        """Run `steps` iterations from a start vector (shard)."""
        return self.advance(self.begin(vector, steps), 0, steps)

    def begin(self, vector: tf.Tensor, steps: int) -> Krylov:
        """Return the initial state for a start vector (shard) and `steps`."""
        square = self.reduce(2 * tf.nn.l2_loss(vector)[None])[0]
        usable = (square > 0) & tf.math.is_finite(square)
        first, zeros = tf.constant(0), tf.zeros([steps], vector.dtype)
        start = tf.cond(usable, lambda: vector, lambda: self.draw(first))
        length = tf.where(usable, tf.sqrt(square), tf.ones_like(square))
        return Krylov(
            new_rows(steps, vector.shape[0], vector.dtype),
            Tridiagonal(zeros, zeros, tf.zeros([steps], tf.bool)),
            Candidate(start, length, ~usable, tf.zeros_like(square), first),
        )

    def advance(
        self, state: Krylov, first: int | tf.Tensor, end: int | tf.Tensor
    ) -> Krylov:
        """Run iterations `first` to `end - 1`, integers in eager mode."""
        if tf.executing_eagerly():  # the product may be no graph function
            for index in range(first, end):
                state = self._iterate(tf.constant(index), state)
            return state
        return repeat(self._iterate, state, first, end)

    def _iterate(self, index: tf.Tensor, state: Krylov) -> Krylov:
        """Add a row to the basis and find the next candidate."""
        vector, length, fresh, scale, num_rows = state.candidate
        # A fresh candidate has a row of zeros, and is its own product.
        row = vector * tf.where(fresh, tf.zeros_like(length), 1 / length)
        product = self.product(row)
        image = tf.cond(fresh, lambda: vector, lambda: product)
        basis = set_row(state.basis, index, row)
        # Keep all rows for XLA, which needs a fixed shape: zeros add 0.
        rows = basis if in_xla() else basis[: index + 1]
        previous = basis[tf.maximum(index - 1, 0)]
        # The first row, and a row after a breakdown, have no coupling.
        uncoupled = fresh | tf.equal(index, 0)
        before = tf.where(uncoupled, 0 * length, length)
        image -= before * previous
        component = self.reduce(row_products(row[None], image))[0]
        residual = self._project_out(rows, image - component * row, index)
        # Project at most twice (Kahan): a vector that is short after the second
        # pass lies in the span of the rows.
        residual = tf.cond(
            residual.is_short,
            lambda: self._project_out(
                rows, residual.image, index, residual.last_component
            ),
            lambda: residual,
        )
        diagonal = component + residual.last_component
        # The coupling to the next row, and the next candidate.
        length = tf.sqrt(tf.maximum(residual.square, 0))
        ones, zeros = tf.ones_like(length), tf.zeros_like(length)
        num_rows += tf.cast(~fresh, tf.int32)
        largest = tf.where(fresh, zeros, tf.maximum(abs(diagonal), length))
        scale = tf.maximum(scale, largest)
        noise = 10 * rounding(length.dtype) * tf.where(fresh, ones, scale)
        is_breakdown = (length <= noise) | residual.is_short
        is_breakdown |= num_rows >= self.size
        is_breakdown &= tf.math.is_finite(residual.square)
        coupling = tf.where(is_breakdown | fresh, zeros, length)
        vector = tf.cond(
            is_breakdown, lambda: self.draw(index + 1), lambda: residual.image
        )
        length = tf.where(is_breakdown, ones, length)
        is_current = tf.range(basis.shape[0]) == index
        elements = zip(
            (diagonal, coupling, ~fresh), state.tridiagonal, strict=True
        )
        return Krylov(
            basis,
            Tridiagonal(*(tf.where(is_current, x, y) for x, y in elements)),
            Candidate(vector, length, is_breakdown, scale, num_rows),
        )

    def _project_out(
        self,
        rows: tf.Tensor,
        image: tf.Tensor,
        index: tf.Tensor,
        component: float | tf.Tensor = 0.0,
    ) -> Residual:
        """Subtract the components along all rows; sum those along `index`."""
        square = 2 * tf.nn.l2_loss(image)
        sums = tf.concat([row_products(rows, image), square[None]], 0)
        sums = self.reduce(sums)
        components, square = sums[:-1], sums[-1]
        removed = tf.reduce_sum(components * components)
        return Residual(
            image - tf.matmul(components[None], rows)[0],
            square - removed,
            2 * removed > square,
            component + components[index],
        )


def random_vector(size: int, seed: int, index: int | tf.Tensor) -> tf.Tensor:
    """Random vector of norm about 1, the same on every device."""
    vector = tf.random.stateless_normal([size], [seed, index])
    return vector / tf.sqrt(tf.cast(size, vector.dtype))


class RitzPairs(NamedTuple):
    """Ritz pairs of both ends of a spectrum, in float64; zero if missing."""

    values: tf.Tensor  # Values `(r,)`, ascending.
    weights: tf.Tensor  # Coefficients of vectors in the basis, `(r, steps)`.


def ritz_pairs(
    tridiagonal: Tridiagonal, num_largest: int, num_smallest: int
) -> RitzPairs:
    """Ritz pairs of both ends of the spectrum of a tridiagonal matrix."""
    diagonal = tf.cast(tridiagonal.diagonal, tf.float64)
    coupling = tf.cast(tridiagonal.coupling[:-1], tf.float64)
    kept = tridiagonal.kept
    elements = tf.concat([diagonal, coupling], 0)
    finite = tf.reduce_all(tf.math.is_finite(elements))
    # Give zero rows an eigenvalue above all others, to sort them last.
    bound = 1 + 4 * tf.reduce_max(tf.abs(elements))
    matrix = tf.linalg.diag(tf.where(kept, diagonal, bound))
    if coupling.shape[0]:
        matrix += tf.linalg.diag(coupling, k=1) + tf.linalg.diag(coupling, k=-1)
    # Replace a non-finite matrix, for which the CPU kernel raises an error.
    values, vectors = tf.linalg.eigh(
        tf.where(finite, matrix, tf.zeros_like(matrix))
    )
    count = tf.reduce_sum(tf.cast(kept, tf.int32))
    low, high = tf.range(num_smallest), count - 1 - tf.range(num_largest)
    index = tf.concat([low, high], 0)
    valid = tf.concat([low < count - num_largest, high >= 0], 0)
    index = tf.where(valid, index, 0)
    values = tf.where(valid, tf.gather(values, index), 0)
    order = tf.argsort(values)
    weights = tf.transpose(tf.gather(vectors, index, axis=1))
    weights = tf.where(valid[:, None], weights, 0)
    return RitzPairs(
        nan_unless(finite, tf.gather(values, order)), tf.gather(weights, order)
    )
