"""The example's equation, and a short race."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import contest
import poisson
from tests.support.dtypes import floats


@pytest.mark.parametrize("dimension", [2, 5])
def test_the_solution_solves_the_problem(dimension: int) -> None:
    """What the model returns of it is the right-hand side."""

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
    assert weights is not None
    np.testing.assert_allclose(got, y, atol=1e-10)
    inside = x[:, -1] == 1
    np.testing.assert_allclose(np.sum(weights[inside]), len(x))
    edge = x[~inside, :-1]
    assert np.all(np.any((edge == 0) | (edge == 1), 1))


@pytest.mark.slow
def test_a_race(tmp_path: pathlib.Path) -> None:
    with floats("float64"):
        races = {
            name: poisson.solve(2, name, 1.0, 0)
            for name in ("gauss_newton", "lbfgs")
        }
    for race in races.values():
        assert race.seconds[-1] >= 1.0
        assert race.at(0.0) == race.errors[0]
        assert race.at(1e9) == race.errors[-1]
    text = contest.table(races, [0.5, 1.0])
    assert [line.split()[0] for line in text.splitlines()] == [
        "error", "gauss_newton", "lbfgs",
    ]  # fmt: skip
    contest.plot(races, str(tmp_path / "plot.png"), "title")
    assert (tmp_path / "plot.png").stat().st_size > 5_000
