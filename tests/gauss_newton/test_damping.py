"""The tries of a step, on models of a loss that are known in closed form."""

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
    """The loss that its model describes exactly."""
    errors = RESIDUALS + tf.linalg.matvec(tf.constant(ROWS), change)
    return tf.reduce_sum(errors**2) / 2


def tries(
    loss: Callable[[Any], Any] = quadratic,
    momentum: Any = 0.0,
    damping: float = 0.5,
    rows: bool = False,
    rate: float = 1.0,
    max_tries: int = 6,
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
    )


def step(damping: float, momentum: Any = 0.0) -> Any:
    """What minimises `|K d + r|^2 + shift |d - momentum|^2`."""
    shift = damping * np.sum(ROWS**2) / 4
    stacked = np.concatenate([ROWS, np.sqrt(shift) * np.eye(4)])
    right = np.concatenate(
        [-RESIDUALS, np.sqrt(shift) * (np.zeros(4) + momentum)]
    )
    return np.linalg.lstsq(stacked, right)[0]


@pytest.mark.parametrize(("rows", "rate"), [(False, 1.0), (True, 0.5)])
def test_a_model_that_holds(rows: bool, rate: float) -> None:
    """A ratio of 1 makes the damping three times smaller."""
    found = tries(rows=rows, momentum=0.25, rate=rate)
    want = step(0.5, 0.25)
    np.testing.assert_allclose(found.change, want, rtol=1e-10)
    assert int(found.tries) == 1
    assert bool(found.accepted)
    np.testing.assert_allclose(found.damping, 0.5 / 3)
    before = np.sum(RESIDUALS**2)
    after = np.sum((RESIDUALS + ROWS @ want * rate) ** 2)
    np.testing.assert_allclose(found.actual, (before - after) / 2, rtol=1e-10)
    np.testing.assert_allclose(found.predicted, found.actual, rtol=1e-10)


def test_failures_grow_the_damping() -> None:
    """By 4, 8, 16; the momentum is of the first try alone."""

    def narrow(change: Any) -> Any:
        """Rises for all but short steps."""
        size = tf.norm(change)
        return tf.where(size < 0.2, quadratic(change), 1e3)

    found = tries(narrow, momentum=1.0)
    dampings = 0.5 * np.array([1, 4, 32, 512, 2**14])
    sizes = [np.linalg.norm(step(d)) for d in dampings]
    first = int(np.argmax(np.array(sizes) < 0.2))
    assert first > 0
    assert int(found.tries) == first + 1
    np.testing.assert_allclose(found.used, dampings[first])
    np.testing.assert_allclose(found.change, step(dampings[first]), rtol=1e-9)


@pytest.mark.parametrize("value", [1e9, float("nan")])
def test_a_step_that_is_no_descent_is_not_taken(value: float) -> None:
    def wall(change: Any) -> Any:
        here = tf.reduce_all(change == 0)
        return tf.where(here, quadratic(change), value)

    found = tries(wall, damping=2.0**-10)
    assert not found.accepted
    assert not found.settled
    assert int(found.tries) == 6
    np.testing.assert_array_equal(found.change, 0)
    np.testing.assert_allclose(found.damping, 2.0 ** (27 - 10))
    assert float(tries(wall, damping=LARGEST).damping) == LARGEST
    assert int(tries(wall, max_tries=2).tries) == 2


def test_the_rounding_of_the_loss_ends_the_tries() -> None:
    """With 1e18 added, no reduction can be seen: one try, same damping."""
    found = tries(lambda change: quadratic(change) + 1e18)
    assert bool(found.settled)
    assert int(found.tries) == 1
    np.testing.assert_array_equal(found.damping, 0.5)
    np.testing.assert_array_equal(found.change, 0)
