"""Train a DeepXDE problem (TensorFlow backend) by `GaussNewton.minimize`."""

import copy
from typing import Any

import deepxde as dde
import keras
import numpy as np
import tensorflow as tf

import tfkfac

VALUED = (dde.icbc.DirichletBC, dde.icbc.NeumannBC, dde.icbc.IC)
SLOPED = (dde.icbc.NeumannBC, dde.icbc.RobinBC)
PAIRED = (dde.icbc.PeriodicBC, dde.icbc.Interface2DBC)


def conditions(data: Any, network: Any) -> tuple[dict[str, Any], ...]:
    """Return residuals and points of a `dde.data.PDE` or `TimePDE`."""

    def equation(x: Any) -> Any:
        dde.gradients.clear()
        return tf.concat([*tf.nest.flatten(data.pde(x, network(x)))], 1)

    residuals, points = {"equation": equation}, {"equation": data.train_x_all}
    edges = np.split(data.bc_points(), np.cumsum(data.num_bcs)[:-1])
    for i, (bc, x) in enumerate(zip(data.bcs, edges, strict=True)):
        residuals[f"{i}"], points[f"{i}"] = boundary(bc, x, network)
    return residuals, points


def boundary(bc: Any, x: Any, network: Any) -> tuple[Any, Any]:
    """Return the residual of a condition, and rows (point, value, normal)."""
    if isinstance(bc, PAIRED):
        raise ValueError(f"{type(bc).__name__} is not of single points.")
    valued, sloped = isinstance(bc, VALUED), isinstance(bc, SLOPED)
    values = bc.func(x, 0, len(x), None) if valued else getattr(bc, "values", 0)
    normals = bc.boundary_normal(x, 0, len(x), None) if sloped else 0 * x
    column = np.broadcast_to(np.reshape(values, [-1, 1]), [len(x), 1])

    def residual(points: Any) -> Any:
        inputs, value, normal = tf.split(points, [x.shape[1], 1, x.shape[1]], 1)
        local = copy.copy(bc)  # with the values and normals of these points
        local.boundary_normal, local.values = (lambda *_: normal), value
        local.func = (lambda *_: value) if valued else getattr(bc, "func", None)
        dde.gradients.clear()
        return local.error(inputs, inputs, network(inputs), 0, None)

    return residual, np.hstack([x, column, normals])


if __name__ == "__main__":
    dde.config.set_default_float("float64")
    keras.config.set_floatx("float64")
    line = dde.geometry.Interval(0, 1)
    ends = dde.icbc.DirichletBC(line, lambda x: 0 * x, lambda _, on: on)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    u = keras.Sequential([keras.Input((1,)), *layers])
    data = dde.data.PDE(
        line, lambda x, y: dde.grad.hessian(y, x) - x, ends, 50, 2
    )
    residuals, points = conditions(data, u)
    optimizer, weights = tfkfac.GaussNewton(), u.trainable_variables
    optimizer.minimize(residuals, weights, points, steps=100)
    print(u(np.array([[0.5]])))  # -1/16
