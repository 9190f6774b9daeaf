"""Fit a function and its derivatives (Sobolev training), by `GaussNewton`.

    python examples/sobolev.py

The data are values and gradients at 400 points, as a simulation gives energies
and forces. Print the root mean square errors at new points.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac


def function(points: Any) -> Any:
    x, y = tf.unstack(points, axis=-1)
    return tf.sin(3 * x) * tf.exp(-(y**2)) + x * y


def slopes(fit: Any, points: Any) -> Any:
    """Return the gradient of a function of a point, at all points."""
    with tf.GradientTape() as tape:
        tape.watch(points)
        values = fit(points)
    return tape.gradient(values, points)


def main() -> None:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(20, "tanh") for _ in range(2)]
    network = keras.Sequential([keras.Input((2,)), *hidden])
    network.add(keras.layers.Dense(1))
    points, new = np.random.default_rng(0).uniform(-1, 1, (2, 400, 2))

    def value_error(points: Any) -> Any:
        return network(points)[:, 0] - function(points)

    def slope_error(points: Any) -> Any:
        return slopes(network, points) - slopes(function, points)

    conditions = {"values": value_error, "slopes": slope_error}
    data = {"values": points, "slopes": points}
    tfkfac.GaussNewton().minimize(
        conditions, network.trainable_variables, data, steps=100
    )
    for name, error in conditions.items():
        size = tf.sqrt(tf.reduce_mean(error(tf.constant(new)) ** 2))
        print(f"{name}: error {size:.1e}")


if __name__ == "__main__":
    main()
