"""Search for the damping of a step, on losses with a closed-form model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.gauss_newton.solve import (
    LARGEST,
    ParameterSpace,
    ResidualSpace,
    Search,
    search,
)

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 4))
RESIDUALS = RNG.normal(size=6)


def quadratic(change: Any) -> Any:
    """A quadratic loss, equal to its Gauss-Newton model."""
    errors = RESIDUALS + tf.linalg.matvec(tf.constant(ROWS), change)
    return tf.reduce_sum(errors**2) / 2


def tries(
    loss: Callable[[Any], Any] = quadratic,
    momentum: Any = 0.0,
    damping: float = 0.5,
    rows: bool = False,
    rate: float = 1.0,
    max_tries: int = 6,
    second_derivatives: Any = None,
) -> Search:
    k, r = tf.constant(ROWS), tf.constant(RESIDUALS)
    equations: Any = ResidualSpace(k, r)
    if not rows:
        gradient = tf.linalg.matvec(k, r, transpose_a=True)
        equations = ParameterSpace(tf.matmul(k, k, transpose_a=True), gradient)
    zero = tf.zeros([4], tf.float64)
    return search(
        equations,
        loss,
        tf.convert_to_tensor(loss(zero)),
        tf.constant(damping, tf.float64),
        zero + momentum,
        tf.constant(rate, tf.float64),
        max_tries,
        tf.float64,
        second_derivatives,
    )


def step(damping: float, momentum: Any = 0.0) -> Any:
    """The minimiser of `|K d + r|^2 + shift |d - momentum|^2`."""
    shift = damping * np.sum(ROWS**2) / 4
    stacked = np.concatenate([ROWS, np.sqrt(shift) * np.eye(4)])
    right = np.concatenate(
        [-RESIDUALS, np.sqrt(shift) * (np.zeros(4) + momentum)]
    )
    return np.linalg.lstsq(stacked, right)[0]


@pytest.mark.parametrize(("rows", "rate"), [(False, 1.0), (True, 0.5)])
def test_exact_model_is_accepted(rows: bool, rate: float) -> None:
    """A ratio of 1 divides the damping by 3."""
    result = tries(rows=rows, momentum=0.25, rate=rate)
    want = step(0.5, 0.25)
    np.testing.assert_allclose(result.change, want, rtol=1e-10)
    assert int(result.tries) == 1
    assert bool(result.accepted)
    np.testing.assert_allclose(result.damping, 0.5 / 3)
    before = np.sum(RESIDUALS**2)
    after = np.sum((RESIDUALS + ROWS @ want * rate) ** 2)
    np.testing.assert_allclose(result.actual, (before - after) / 2, rtol=1e-10)
    np.testing.assert_allclose(result.predicted, result.actual, rtol=1e-10)


def test_rejected_tries_increase_the_damping() -> None:
    """By 4, 8, 16, ...; only the first try uses the momentum."""

    def narrow(change: Any) -> Any:
        """Decreases only for short steps."""
        size = tf.norm(change)
        return tf.where(size < 0.2, quadratic(change), 1e3)

    result = tries(narrow, momentum=1.0)
    dampings = 0.5 * np.array([1, 4, 32, 512, 2**14])
    sizes = [np.linalg.norm(step(d)) for d in dampings]
    first = int(np.argmax(np.array(sizes) < 0.2))
    assert first > 0
    assert int(result.tries) == first + 1
    np.testing.assert_allclose(result.used, dampings[first])
    np.testing.assert_allclose(result.change, step(dampings[first]), rtol=1e-9)


@pytest.mark.parametrize("value", [1e9, float("nan")])
def test_no_step_without_descent(value: float) -> None:
    def infeasible(change: Any) -> Any:
        here = tf.reduce_all(change == 0)
        return tf.where(here, quadratic(change), value)

    result = tries(infeasible, damping=2.0**-10)
    assert not result.accepted
    assert not result.settled
    assert int(result.tries) == 6
    np.testing.assert_array_equal(result.change, 0)
    np.testing.assert_allclose(result.damping, 2.0 ** (27 - 10))
    assert float(tries(infeasible, damping=LARGEST).damping) == LARGEST
    assert int(tries(infeasible, max_tries=2).tries) == 2


def test_rounding_of_the_loss_ends_the_tries() -> None:
    """1e18 hides every reduction: one try, and the damping stays."""
    result = tries(lambda change: quadratic(change) + 1e18)
    assert bool(result.settled)
    assert int(result.tries) == 1
    np.testing.assert_array_equal(result.damping, 0.5)
    np.testing.assert_array_equal(result.change, 0)


@pytest.mark.parametrize(("rows", "length"), [(0, 1e-3), (1, 1e-3), (1, 9.0)])
def test_geodesic_acceleration(rows: bool, length: float) -> None:
    """Add `-1/2 (K^T K + shift)^-1 K^T r''` unless it is long."""
    second = length * RNG.normal(size=6)
    rate, shift = 0.5, 0.5 * np.sum(ROWS**2) / 4
    pulled = second if rows else ROWS.T @ second
    result = tries(
        rows=rows, rate=rate, second_derivatives=lambda change: pulled
    )
    straight = step(0.5)
    matrix = ROWS.T @ ROWS + shift * np.eye(4)
    bend = -rate / 2 * np.linalg.solve(matrix, ROWS.T @ second)
    is_long = 2 * np.linalg.norm(bend) > 0.75 * np.linalg.norm(straight)
    assert is_long == (length > 1)
    want = straight + (0 if is_long else bend)
    np.testing.assert_allclose(result.change, want, rtol=1e-9)
    # The predicted reduction is the one without acceleration.
    alone = tries(rows=rows, rate=rate)
    np.testing.assert_allclose(result.predicted, alone.predicted, rtol=1e-12)
