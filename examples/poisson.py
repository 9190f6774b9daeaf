"""Solve Poisson's equation by a network, with `fit` and `loss="mse"`.

    python examples/poisson.py --dimension 5 --steps 300

The model returns the left-hand sides of the equation, so that squared errors
are residuals. Compares GaussNewton and Adam; gauss_newton.py has more
optimizers and equations.
"""

import argparse
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac


class Poisson(keras.Model):
    """The Laplacian of a network u inside, and u on the boundary."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        *x, inside = tf.unstack(inputs, axis=1)  # 1, or 0 on the boundary
        with tf.GradientTape(persistent=True) as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                u = self.network(tf.stack(x, 1))[:, 0]
            slopes = first.gradient(u, x)
        bends = [second.gradient(s, c) for s, c in zip(slopes, x, strict=True)]
        return (inside * tf.add_n(bends) + (1 - inside) * u)[:, None]


def solution(x: Any) -> Any:
    """Return a product of sines in 2 dimensions, else a sum of cosines."""
    if x.shape[1] == 2:
        return np.sin(np.pi * x).prod(1)[:, None]
    return np.cos(np.pi * x).sum(1)[:, None]


def problem(dimension: int) -> tuple[Any, Any, Any]:
    """Return points with their flag, right-hand sides, and sample weights."""
    rng, flat = np.random.default_rng(0), dimension == 2
    sizes, boundary = ((900, 120), 10) if flat else ((3000, 500), 1)
    inside, edge = (rng.uniform(size=(size, dimension)) for size in sizes)
    rows, side = np.arange(len(edge)), rng.integers(dimension, size=len(edge))
    edge[rows, side] = rng.integers(2, size=len(edge))
    x = np.c_[np.concatenate([inside, edge]), np.repeat([1.0, 0.0], sizes)]
    laplacian = -(1 + flat) * np.pi**2 * solution(inside)
    means = np.repeat([1 / sizes[0], boundary / sizes[1]], sizes)
    return x, np.concatenate([laplacian, solution(edge)]), len(x) * means


def solve(dimension: int, optimizer: Any, steps: int) -> float:
    """Train a network; return its relative L2 error at new points."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input((dimension,)), *layers])
    model, (x, y, weights) = Poisson(network), problem(dimension)
    model.compile(optimizer, "mse")
    model.fit(x, y, len(x), steps, verbose=0, sample_weight=weights)
    new = np.random.default_rng(1).uniform(size=(9000, dimension))
    exact = solution(new)
    errors = network.predict(new, verbose=0) - exact
    return float(np.linalg.norm(errors) / np.linalg.norm(exact))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dimension", type=int, choices=(2, 5), default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    keras.config.set_floatx("float64")
    for optimizer in (tfkfac.GaussNewton(), keras.optimizers.Adam(3e-3)):
        start = time.process_time()
        error = solve(options.dimension, optimizer, options.steps)
        print(
            f"{optimizer.name:12} {options.steps} steps, "
            f"{time.process_time() - start:.1f} CPU s, error {error:.1e}"
        )
