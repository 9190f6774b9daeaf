"""The equation of the example holds for its solution; it is solved."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import poisson
import tfkfac
from tests.support.dtypes import floats


@pytest.mark.parametrize("dimension", [2, 5])
def test_the_solution_solves_the_problem(dimension: int) -> None:
    """The outputs of the model for the solution are the right-hand side."""

    class Solution(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if dimension == 2:
                u = tf.sin(np.pi * x[:, 0]) * tf.sin(np.pi * x[:, 1])
            else:
                u = tf.reduce_sum(tf.cos(np.pi * x), 1)
            return u[:, None]

    with floats("float64"):
        x, y, weights = poisson.problem(dimension)
        got = poisson.Poisson(Solution())(x)
    np.testing.assert_allclose(got, y, atol=1e-10)
    inside = x[:, -1] == 1
    np.testing.assert_allclose(np.sum(weights[inside]), len(x))
    edge = x[~inside, :-1]
    assert np.all(np.any((edge == 0) | (edge == 1), 1))


@pytest.mark.slow
def test_it_is_solved() -> None:
    with floats("float64"):
        assert poisson.solve(2, tfkfac.GaussNewton(), 60) < 1e-3
