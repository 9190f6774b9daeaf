"""The damped Gauss-Newton step, in the space of weights or of residuals.

With the rows K of the residuals' Jacobian, their values r and a ridge R (the
Hessian of the weights' regularisers), the model of the loss around a point is

`M(d) = g^T d + 1/2 d^T (K^T K + R) d`, `g = K^T r` + that of the regularisers,

and a step minimises `M(d) + shift/2 |d - start|^2`:

- in the space of the n weights, `d = start - (K^T K + R + shift I)^-1
  (g + (K^T K + R) start)`;
- in that of the m residuals, for R = 0, by the identity of Woodbury,
  `d = start - K^T (K K^T + shift I)^-1 (r + K start)`.

Without `start` it is the step of Levenberg and Marquardt; with a multiple of
the step before it is SPRING (Goldshlager, Abrahamsen & Lin, 2024, eq. 8).

The valleys of such losses are curved. Geodesic acceleration (Transtrum &
Sethna, arXiv 1201.5885, eq. 9) bends a step d by `-1/2 (K^T K + R + shift I)^-1
K^T y''`, with the second derivatives y'' along d of what the rows K are the
first ones of, by the same factor. It is left out where it is no small
correction: where twice its length is more than 0.75 of that of d.

A step tries several dampings, until one lowers the loss, by Nielsen's rule
(1999; Madsen, Nielsen & Tingleff, Methods for Non-Linear Least Squares
Problems, 2004, algorithm 3.16). With the ratio of the reduction of the loss to
that of its model, a step that is taken multiplies the damping by
`max(1/3, 1 - (2 ratio - 1)^3)`, tries that fail by 4, 8, 16, ... Nielsen's
2, 4, 8 would leave 2/3 after a failure and a success: what has failed is tried
again in the next step. The damping is in units of the mean of the matrix'
diagonal.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf
from typing_extensions import override

from tfkfac.compat.graphs import repeat
from tfkfac.linalg.tensors import all_finite, rounding
from tfkfac.linalg.vectors import row_products


class NormalEquations(abc.ABC):
    """The model of the loss of one step."""

    gradient: tf.Tensor  # g
    scale: tf.Tensor  # mean diagonal of `K^T K + R`, the unit of the damping

    matrix: tf.Tensor  # that is damped

    def factor(self, shift: tf.Tensor) -> tf.Tensor:
        """The Cholesky factor with a shift; NaN where there is none."""
        diagonal = tf.linalg.diag_part(self.matrix) + shift
        damped = tf.linalg.set_diag(self.matrix, diagonal)
        return tf.linalg.cholesky(damped)

    @abc.abstractmethod
    def step(self, factor: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """The step."""

    @abc.abstractmethod
    def bend(self, factor: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
        """The correction of a step by the second derivatives y'' along it.

        These are `(m,)` in the space of residuals, `K^T y''` in the other.
        """

    @abc.abstractmethod
    def curvature(self, step: tf.Tensor) -> tf.Tensor:
        """`d^T (K^T K + R) d`, a float64 scalar."""


class ParameterSpace(NormalEquations):
    """By a matrix of the weights, `K^T K + R`, `(n, n)`."""

    def __init__(self, matrix: tf.Tensor, gradient: tf.Tensor) -> None:
        self.matrix = matrix
        self.gradient = gradient
        self.scale = unit(tf.reduce_mean(tf.linalg.diag_part(matrix)))

    @override
    def step(self, factor: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        right = self.gradient + tf.linalg.matvec(self.matrix, start)
        return start - solve(factor, right)

    @override
    def bend(self, factor: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
        return -solve(factor, turn) / 2

    @override
    def curvature(self, step: tf.Tensor) -> tf.Tensor:
        return inner(step, tf.linalg.matvec(self.matrix, step))


class ResidualSpace(NormalEquations):
    """By a matrix of the residuals, `K K^T`, of the rows K, `(m, n)`."""

    def __init__(self, rows: tf.Tensor, residuals: tf.Tensor) -> None:
        self.rows = rows
        self.residuals = residuals
        self.gradient = tf.linalg.matvec(rows, residuals, transpose_a=True)
        self.matrix = tf.matmul(rows, rows, transpose_b=True)
        self.scale = unit(tf.linalg.trace(self.matrix) / rows.shape[1])

    @override
    def step(self, factor: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        found = solve(factor, self.residuals + row_products(self.rows, start))
        return start - tf.linalg.matvec(self.rows, found, transpose_a=True)

    @override
    def bend(self, factor: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
        found = solve(factor, turn)
        return -tf.linalg.matvec(self.rows, found, transpose_a=True) / 2

    @override
    def curvature(self, step: tf.Tensor) -> tf.Tensor:
        image = row_products(self.rows, step)
        return inner(image, image)


def unit(mean: tf.Tensor) -> tf.Tensor:
    """The unit of the damping. A batch without weight has no diagonal."""
    return tf.where(mean == 0, tf.ones_like(mean), mean)


def solve(factor: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Solves for one right-hand side by a Cholesky factor."""
    return tf.linalg.cholesky_solve(factor, right[:, None])[:, 0]


def inner(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """The inner product of two vectors, a float64 scalar."""
    return tf.cast(tf.reduce_sum(left * right), tf.float64)


LARGEST = 1e6
# Most of the length of a step that twice its bend may have.
_LONGEST_BEND = 0.75
_GROWTH = 4.0
# A reduction of so many roundings of the loss cannot be seen in it.
_ROUNDINGS = 8


class Search(NamedTuple):
    """The outcome of the tries of a step.

    It is settled if the loss is so near to its minimum that no reduction can be
    seen in its digits.
    """

    damping: tf.Tensor  # of the next try, or of the next step, float64
    growth: tf.Tensor  # that another failure multiplies it by
    tries: tf.Tensor  # number, int32
    change: tf.Tensor  # the step, zero if none is taken
    used: tf.Tensor  # damping of the last try
    predicted: tf.Tensor  # reduction of the loss that the model says
    actual: tf.Tensor  # reduction of the loss
    accepted: tf.Tensor
    settled: tf.Tensor


def search(
    equations: NormalEquations,
    loss: Callable[[tf.Tensor], tf.Tensor],
    before: tf.Tensor,
    damping: tf.Tensor,
    momentum: tf.Tensor,
    rate: tf.Tensor,
    max_tries: int,
    precision: tf.DType,
    turn: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> Search:
    """Tries dampings, at most `max_tries`, until a step lowers the loss.

    The first one alone is pulled to `momentum`, a multiple of the step before.
    `loss` after a change of the weights is computed in `precision`, and is
    float64, as it is `before`. `turn` of a step is what `bend` takes; None
    leaves steps straight. Collectives are legal in both: all replicas make the
    same tries.
    """
    gradient, dtype = equations.gradient, equations.gradient.dtype
    floor = _ROUNDINGS * rounding(precision) * tf.abs(before)
    least = 1e-14 if dtype == tf.float64 else 1e-8  # a matrix' rounding

    def attempt(index: tf.Tensor, last: Search) -> Search:
        shift = tf.cast(last.damping, dtype) * equations.scale
        start = tf.where(index > 0, tf.zeros_like(momentum), momentum)
        factor = equations.factor(shift)
        change = equations.step(factor, start)
        slope = rate * inner(gradient, change)
        curve = tf.square(rate) * equations.curvature(change)
        predicted = -(slope + curve / 2)
        if turn is not None:
            # Of second order in the length of the step.
            bend = tf.cast(rate, dtype) * equations.bend(factor, turn(change))
            is_small = 2 * tf.norm(bend) <= _LONGEST_BEND * tf.norm(change)
            change += tf.where(is_small, bend, tf.zeros_like(bend))
        actual = before - loss(tf.cast(rate, dtype) * change)
        # Not if one of them is NaN. A step that leads uphill is none, even if
        # chance has made the loss smaller.
        accepted = (actual > 0) & (predicted > 0) & all_finite([change])
        settled = ~accepted & (predicted >= 0) & (predicted <= floor)
        ratio = tf.minimum(actual / predicted, 1)
        times = tf.maximum(1 - (2 * ratio - 1) ** 3, 1 / 3)
        times = tf.where(accepted, times, last.growth)
        times = tf.where(settled, tf.ones_like(times), times)
        return Search(
            tf.clip_by_value(last.damping * times, least, LARGEST),
            2 * last.growth,
            last.tries + 1,
            tf.where(accepted, change, tf.zeros_like(change)),
            last.damping,
            predicted,
            actual,
            accepted,
            settled,
        )

    nothing = tf.constant(0, tf.float64)
    first = Search(
        damping,
        tf.constant(_GROWTH, tf.float64),
        tf.constant(0),
        tf.zeros_like(gradient),
        *[nothing] * 3,
        *[tf.constant(False)] * 2,
    )
    return repeat(
        lambda index, last: tf.cond(
            last.accepted | last.settled,
            lambda: last,
            lambda: attempt(index, last),
        ),
        first,
        0,
        max_tries,
    )
