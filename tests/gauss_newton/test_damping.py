"""Search for the damping of a step that finds none.

The other tests of this folder compare dampings and tries with NumPy.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.gauss_newton.solve import LARGEST, ResidualSpace, Search, search

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 4))
RESIDUALS = RNG.normal(size=6)


def quadratic(change: Any) -> Any:
    """A quadratic loss, equal to its Gauss-Newton model."""
    errors = RESIDUALS + tf.linalg.matvec(tf.constant(ROWS), change)
    return tf.reduce_sum(errors**2) / 2


def tries(
    loss: Callable[[Any], Any], damping: float = 0.5, max_tries: int = 6
) -> Search:
    zero = tf.zeros([4], tf.float64)
    return search(
        ResidualSpace(tf.constant(ROWS), tf.constant(RESIDUALS)),
        loss,
        tf.convert_to_tensor(loss(zero)),
        tf.constant(damping, tf.float64),
        zero,
        tf.constant(1.0, tf.float64),
        max_tries,
        tf.float64,
        lambda change: tf.zeros([6], tf.float64),  # linear residuals
    )


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
    # By 4, 8, 16, ... 128.
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
