"""DeepXDE's problems as named conditions, where it is installed."""

import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.dtypes import floats

os.environ.setdefault("DDE_BACKEND", "tensorflow")
dde: Any = pytest.importorskip("deepxde")
if dde.backend.backend_name != "tensorflow":
    pytest.skip("DeepXDE has another backend", allow_module_level=True)


@pytest.fixture(autouse=True)
def exact() -> Any:
    dde.config.set_default_float("float64")
    with floats("float64"):
        yield
    dde.config.set_default_float("float32")


def mlp(width: int) -> Any:
    layers = [keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((1,)), *layers])


def square(num: int) -> Any:
    """`-u'' = pi^2 sin(pi x)`, u(0) = 0 and u'(1) = -pi, and u(1/2) = 1."""
    line = dde.geometry.Interval(0, 1)

    def pde(x: Any, u: Any) -> Any:
        bend = dde.grad.hessian(u, x)
        return [bend + np.pi**2 * tf.sin(np.pi * x)]

    def on(end: float) -> Any:
        return lambda x, is_on: is_on and np.isclose(x[0], end)

    conditions = [
        dde.icbc.DirichletBC(line, lambda x: 0 * x, on(0.0)),
        dde.icbc.NeumannBC(line, lambda x: -np.pi + 0 * x, on(1.0)),
        dde.icbc.PointSetBC(np.array([[0.5]]), np.array([[1.0]])),
        dde.icbc.OperatorBC(line, lambda x, u, _: u + 0 * x, on(1.0)),
    ]
    return dde.data.PDE(line, pde, conditions, num, 2)


def test_residuals_are_those_of_deepxde() -> None:
    import deepxde_problem as bridge

    data, network = square(7), mlp(5)
    x = tf.constant(data.train_x)

    @tf.function
    def theirs() -> Any:
        dde.gradients.clear()
        y = network(x)
        return data.losses(None, y, lambda _, e: tf.reduce_mean(e**2), x, None)

    residuals, points = bridge.conditions(data, network)
    ours = tf.function(
        lambda: [
            tf.reduce_mean(residual(tf.constant(points[name])) ** 2)
            for name, residual in residuals.items()
        ]
    )
    np.testing.assert_allclose(
        np.array(ours())[1:], np.array(theirs())[1:], rtol=1e-12
    )
    assert len(points["equation"]) == len(data.train_x_all)


def test_it_trains() -> None:
    import deepxde_problem as bridge

    network = mlp(8)
    residuals, points = bridge.conditions(square(40), network)
    tfkfac.GaussNewton().minimize(
        residuals, network.trainable_variables, points, steps=60, every=20
    )
    x = np.linspace(0, 1, 50)[:, None]
    error = np.abs(np.array(network(x)) - np.sin(np.pi * x)).max()
    assert error < 1e-4


def test_pairs_of_points_are_refused() -> None:
    import deepxde_problem as bridge

    line = dde.geometry.Interval(0, 1)
    pairs = dde.icbc.PeriodicBC(line, 0, lambda x, on: on)
    with pytest.raises(ValueError, match="PeriodicBC is not of single points"):
        bridge.boundary(pairs, np.zeros([2, 1]), mlp(3))
