"""Solve Burgers' equation with named conditions, by `GaussNewton.minimize`.

    python examples/gauss_newton.py --seconds 20

The network u is an MLP in float64. Every five steps new points of the equation
are sampled, more where the residual is large. Print the relative L2 error.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac

NU = 0.01  # viscosity


def residual(network: Any, points: Any) -> Any:
    """Return `u_t + u u_x - nu u_xx`."""
    t, x = tf.unstack(points, axis=1)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch((t, x))
            u = network(tf.stack([t, x], 1))[:, 0]
        u_t, u_x = inner.gradient(u, (t, x))
    return u_t + u * u_x - NU * outer.gradient(u_x, x)


def solution(points: np.ndarray) -> np.ndarray:
    """Solve the equation from -sin(pi x) by the Cole-Hopf transform."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    t, x = points[:, :1], points[:, 1:]
    y = x - np.sqrt(4 * NU * t) * z
    share = weights * np.exp(-(np.cos(np.pi * y) + 1) / (2 * np.pi * NU))
    return -(share * np.sin(np.pi * y)).sum(1) / share.sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(20, "tanh") for _ in range(3)]
    network = keras.Sequential([keras.Input((2,)), *hidden])
    network.add(keras.layers.Dense(1))
    measure = tf.function(lambda points: residual(network, points))
    new = np.random.default_rng(1).uniform((0.05, -1), (1, 1), (4000, 2))
    exact = solution(new)

    def sample(step: int) -> np.ndarray:
        random = np.random.default_rng(step)
        points = random.uniform((0, -1), (1, 1), (12_500, 2))
        size = np.abs(measure(tf.constant(points)))
        odds = size / size.mean() + 1
        return points[random.choice(12_500, 2500, False, odds / odds.sum())]

    def report(epoch: int, logs: Any) -> None:
        if epoch % 4 == 0:  # an epoch has `every` steps
            error = np.linalg.norm(network(new)[:, 0] - exact)
            error /= np.linalg.norm(exact)
            print(f"{5 * (epoch + 1)} steps, error {error:.1e}")

    x, t = np.linspace(-1, 1, 200), np.linspace(0, 1, 100)
    walls = np.c_[np.tile(t, 2), np.repeat([-1.0, 1.0], 100)]
    tfkfac.GaussNewton().minimize(
        {
            "equation": lambda points: residual(network, points),
            "start": lambda p: network(p)[:, 0] + tf.sin(np.pi * p[:, 1]),
            "walls": network,
        },
        network.trainable_variables,
        {"equation": sample, "start": np.c_[0 * x, x], "walls": walls},
        weights={"start": 10.0, "walls": 10.0},
        seconds=seconds,
        every=5,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=report)],
    )


if __name__ == "__main__":
    main()
