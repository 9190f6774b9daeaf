"""The damped Gauss-Newton step, in the space of weights or of residuals.

With the Jacobian K of the residuals r and the Hessian R of the L2 penalties,
the quadratic model of the loss around a point is

`M(d) = g^T d + 1/2 d^T (K^T K + R) d`, `g = K^T r` + gradient of the penalties.

A step d minimises `M(d) + shift/2 |d - start|^2`:

- in the space of the n weights: `d = start - (K^T K + R + shift I)^-1
  (g + (K^T K + R) start)`;
- in the space of the m residuals, for R = 0, by the Woodbury identity:
  `d = start - K^T (K K^T + shift I)^-1 (r + K start)`.

With `start = 0` this is the Levenberg-Marquardt step. With a multiple of the
previous step it is SPRING (Goldshlager, Abrahamsen & Lin, 2024, eq. 8).

Geodesic acceleration (Transtrum & Sethna, arXiv 1201.5885, eq. 9) adds to d the
correction `-1/2 (K^T K + R + shift I)^-1 K^T r''`, with the second derivatives
r'' of the residuals along d. It reuses the Cholesky factor. It is skipped if
`2 |correction| > 0.75 |d|`.

A step tries several dampings until the loss decreases, by Nielsen's rule (1999;
Madsen, Nielsen & Tingleff, Methods for Non-Linear Least Squares Problems, 2004,
algorithm 3.16). An accepted try multiplies the damping by `max(1/3,
1 - (2 ratio - 1)^3)`, with the ratio of the actual to the predicted reduction.
Rejected tries multiply it by 4, 8, 16, ... With Nielsen's 2, 4, 8, one rejected
and one accepted try would leave 2/3 of the damping, and the next step would
fail again. The unit of the damping is the mean diagonal of `K^T K + R`.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import tensorflow as tf

from tfkfac.compat.graphs import repeat
from tfkfac.linalg.tensors import all_finite, rounding
from tfkfac.linalg.vectors import row_products


class NormalEquations(NamedTuple):
    """Quadratic model of a step, in the space of weights or of residuals."""

    matrix: tf.Tensor  # weights: `K^T K + R`; residuals: `K K^T`
    right: tf.Tensor  # right-hand side; weights: g; residuals: r
    gradient: tf.Tensor  # g, in both spaces
    scale: tf.Tensor  # mean diagonal of `K^T K + R`, the unit of the damping
    rows: tf.Tensor | None = None  # K; None for the space of weights

    @classmethod
    def of_residuals(cls, rows: tf.Tensor, residuals: tf.Tensor) -> Self:
        """Create the equations in the space of residuals."""
        matrix = tf.matmul(rows, rows, transpose_b=True)
        gradient = tf.linalg.matvec(rows, residuals, transpose_a=True)
        scale = unit(tf.linalg.trace(matrix) / rows.shape[1])
        return cls(matrix, residuals, gradient, scale, rows)

    def factor(self, shift: tf.Tensor) -> tf.Tensor:
        """Return the Cholesky factor of `matrix + shift I`; NaN if it fails."""
        diagonal = tf.linalg.diag_part(self.matrix) + shift
        return tf.linalg.cholesky(tf.linalg.set_diag(self.matrix, diagonal))

    def step(self, factor: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """Return the step d, given the result of `factor`."""
        return start - self._solve(factor, self.right + self._image(start))

    def correction(self, factor: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        """Return the correction of geodesic acceleration.

        `second` is `r''` in the space of residuals, `K^T r''` in the space of
        weights.
        """
        return -self._solve(factor, second) / 2

    def curvature(self, step: tf.Tensor) -> tf.Tensor:
        """Return `d^T (K^T K + R) d`, a float64 scalar."""
        image = self._image(step)
        return inner(step if self.rows is None else image, image)

    def _image(self, step: tf.Tensor) -> tf.Tensor:
        """Return `(K^T K + R) d` in the space of weights, else `K d`."""
        if self.rows is None:
            return tf.linalg.matvec(self.matrix, step)
        return row_products(self.rows, step)

    def _solve(self, factor: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """Solve for one right-hand side; return a vector of weights."""
        solution = tf.linalg.cholesky_solve(factor, right[:, None])[:, 0]
        if self.rows is None:
            return solution
        return tf.linalg.matvec(self.rows, solution, transpose_a=True)


def unit(mean: tf.Tensor) -> tf.Tensor:
    """Return `mean`, or 1 if `mean` is 0, as the unit of the damping."""
    return tf.where(mean == 0, tf.ones_like(mean), mean)


def inner(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Inner product of two vectors, as a float64 scalar."""
    return tf.cast(tf.reduce_sum(left * right), tf.float64)


# Upper bound of `2 |correction| / |d|` of geodesic acceleration.
_MAX_CORRECTION_RATIO = 0.75
# A smaller reduction counts as a rounding error; in epsilons of the loss.
_MIN_REDUCTION = 8
_GROWTH = 4.0  # factor of the damping after the first rejected try
LARGEST = 1e6  # upper bound of the damping


class Search(NamedTuple):
    """Result of the trial steps of one optimizer step."""

    damping: tf.Tensor  # for the next try or step, float64
    growth: tf.Tensor  # factor of the damping if the next try is rejected
    tries: tf.Tensor  # number of tries, int32
    change: tf.Tensor  # the step d; zero if rejected
    used: tf.Tensor  # damping of the last try
    predicted: tf.Tensor  # reduction of the quadratic model
    actual: tf.Tensor  # reduction of the loss
    accepted: tf.Tensor
    settled: tf.Tensor  # True if `predicted` is below the loss's rounding error


def search(
    equations: NormalEquations,
    loss: Callable[[tf.Tensor], tf.Tensor],
    before: tf.Tensor,
    damping: tf.Tensor,
    momentum: tf.Tensor,
    rate: tf.Tensor,
    max_tries: int,
    precision: tf.DType,
    second_derivatives: Callable[[tf.Tensor], tf.Tensor],
) -> Search:
    """Try at most `max_tries` dampings until a step lowers the loss.

    The first try minimises around `start = momentum`, later tries around zero.
    `loss` is float64 but computed in `precision`, like `before`.
    `second_derivatives` maps a step to the argument of `correction`. Both
    functions may use collectives, because all replicas make the same tries.
    """
    gradient, dtype = equations.gradient, equations.gradient.dtype
    rounding_error = _MIN_REDUCTION * rounding(precision) * tf.abs(before)
    # Lower bound of the damping, about the rounding errors of the matrix.
    min_damping = 1e-14 if dtype == tf.float64 else 1e-8

    def attempt(index: tf.Tensor, state: Search) -> Search:
        shift = tf.cast(state.damping, dtype) * equations.scale
        start = tf.where(index > 0, tf.zeros_like(momentum), momentum)
        factor = equations.factor(shift)
        change = equations.step(factor, start)
        slope = rate * inner(gradient, change)
        curvature = tf.square(rate) * equations.curvature(change)
        predicted = -(slope + curvature / 2)
        # Quadratic in the step: scale by the rate here and again below.
        correction = equations.correction(factor, second_derivatives(change))
        correction *= tf.cast(rate, dtype)
        limit = _MAX_CORRECTION_RATIO * tf.norm(change)
        is_small = 2 * tf.norm(correction) <= limit
        change += tf.where(is_small, correction, tf.zeros_like(correction))
        actual = before - loss(tf.cast(rate, dtype) * change)
        # Reject NaN, and a step with a predicted increase, even if the loss
        # decreases by chance.
        accepted = (actual > 0) & (predicted > 0) & all_finite([change])
        settled = ~accepted & (predicted >= 0) & (predicted <= rounding_error)
        ratio = tf.minimum(actual / predicted, 1)
        multiplier = tf.maximum(1 - (2 * ratio - 1) ** 3, 1 / 3)
        multiplier = tf.where(accepted, multiplier, state.growth)
        multiplier = tf.where(settled, tf.ones_like(multiplier), multiplier)
        return Search(
            tf.clip_by_value(state.damping * multiplier, min_damping, LARGEST),
            2 * state.growth,
            state.tries + 1,
            tf.where(accepted, change, tf.zeros_like(change)),
            state.damping,
            predicted,
            actual,
            accepted,
            settled,
        )

    zero = tf.constant(0, tf.float64)
    initial = Search(
        damping,
        tf.constant(_GROWTH, tf.float64),
        tf.constant(0),
        tf.zeros_like(gradient),
        *[zero] * 3,
        *[tf.constant(False)] * 2,
    )
    return repeat(
        lambda index, state: tf.cond(
            state.accepted | state.settled,
            lambda: state,
            lambda: attempt(index, state),
        ),
        initial,
        0,
        max_tries,
    )
