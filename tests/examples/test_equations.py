"""The examples' equations hold for their solutions; points by residual."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import equations
import gauss_newton
import poisson
import tfkfac
from tests.support.dtypes import floats

SOLUTIONS: dict[str, Any] = {
    "Poisson 2-D": lambda x: tf.reduce_prod(tf.sin(np.pi * x), 1),
    "Poisson 5-D": lambda x: tf.reduce_sum(tf.cos(np.pi * x), 1),
    "Helmholtz": lambda x: (
        tf.sin(np.pi * x[:, 0]) * tf.sin(4 * np.pi * x[:, 1])
    ),
    "wave": lambda x: (
        tf.sin(np.pi * x[:, 1]) * tf.cos(2 * np.pi * x[:, 0])
        + tf.sin(4 * np.pi * x[:, 1]) * tf.cos(8 * np.pi * x[:, 0]) / 2
    ),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solutions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All conditions hold, and the error is none."""

    class Solution(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return SOLUTIONS[name](x)[:, None]

    def exact(features: int, *_: int) -> Any:
        return keras.Sequential([keras.Input((features,)), Solution()])

    with floats("float64"):
        monkeypatch.setattr(equations, "mlp", exact)
        problem = equations.PROBLEMS[name]()
        for condition, residual in problem.residuals.items():
            found = residual(tf.constant(problem.points[condition]))
            np.testing.assert_allclose(found, 0, atol=1e-9)
        assert problem.error() < 1e-12


def test_shock() -> None:
    """`u_t + u u_x = nu u_xx`, by central differences."""
    nu, h = 0.05, 1e-3
    x = np.random.default_rng(0).uniform([0.1, -0.9], [1, 0.9], (50, 2))

    def u(t: float, s: float) -> Any:
        return equations.shock(x + np.array([t, s]) * h, nu)

    bend = (u(0, 1) - 2 * u(0, 0) + u(0, -1)) / h**2
    slope = (u(0, 1) - u(0, -1)) / 2 / h
    change = (u(1, 0) - u(-1, 0)) / 2 / h
    np.testing.assert_allclose(change + u(0, 0) * slope, nu * bend, atol=1e-3)


def test_phases() -> None:
    """`u_t = 1e-4 u_xx + 5 u - 5 u^3`, where x is 0 and u even in it."""
    points, values = equations.phases()
    grid = values.reshape(21, 512)
    middle, h = 256, 2 / 512
    assert np.all(points.reshape(21, 512, 2)[:, middle, 1] == 0)
    u = grid[:, middle]
    bend = (grid[:, middle + 1] - 2 * u + grid[:, middle - 1]) / h**2
    right = 1e-4 * bend + 5 * (u - u**3)
    change = np.gradient(u, 1 / 20, edge_order=2)
    np.testing.assert_allclose(change[1:-1], right[1:-1], atol=2e-3)
    x = points.reshape(21, 512, 2)[0, :, 1]
    np.testing.assert_allclose(grid[0], x**2 * np.cos(np.pi * x), atol=1e-12)


def test_points_by_residual() -> None:
    """|r| / mean + 1: of the two halves 9 / 5 + 1 and 1 / 5 + 1."""

    def residual(x: Any) -> Any:
        return tf.where(x[:, 0] < 0.5, 9.0, 1.0)

    draw = equations.by_residual(residual, equations.box((0, 1)), 2000, 10)
    found, again = draw(3), draw(3)
    np.testing.assert_array_equal(found, again)
    assert found.shape == (2000, 1)
    # 9 / 5 + 1 against 1 / 5 + 1, a little less without replacement.
    share = np.mean(found < 0.5)
    assert abs(share - 2.8 / 4.0) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in gauss_newton.OPTIMIZERS if "tf_" not in n]
)
def test_races(name: str) -> None:
    with floats("float64"):
        race = gauss_newton.race(equations.PROBLEMS["regression"](), name, 6.0)
    assert race is not None
    assert race.seconds[-1] >= 6.0
    assert race.errors[-1] < race.errors[0]


# ---------------------------------------------------- Poisson's equation by fit
@pytest.mark.slow
def test_it_is_solved() -> None:
    with floats("float64"):
        assert poisson.solve(2, tfkfac.GaussNewton(), 60) < 1e-3
