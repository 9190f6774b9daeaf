"""Solves Poisson's equation by a network, with one optimizer after the other.

python examples/poisson.py --dimension 5 --seconds 60 --output poisson.png
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import contest
import tfkfac

OPTIMIZERS = {
    "gauss_newton": tfkfac.GaussNewton,
    "adam": lambda: keras.optimizers.Adam(3e-3),
    "kfac": tfkfac.KFAC,
    "lbfgs": lambda: contest.LBFGS,  # SciPy's
}


class Poisson(keras.Model):
    """What the equation says of a network u: its Laplacian, or u itself."""

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


def solution(x: Any) -> Any:  # its Laplacian: -2 pi^2 times it, or -pi^2 times
    waves = np.sin(np.pi * x).prod(1), np.cos(np.pi * x).sum(1)
    return waves[x.shape[1] > 2][:, None]


def problem(dimension: int) -> contest.Batch:
    """Points with their flag, right-hand sides, and weights."""
    rng, flat = np.random.default_rng(0), dimension == 2
    sizes, boundary = ((900, 120), 10) if flat else ((3000, 500), 1)
    inside, edge = (rng.uniform(size=(size, dimension)) for size in sizes)
    rows, side = np.arange(len(edge)), rng.integers(dimension, size=len(edge))
    edge[rows, side] = rng.integers(2, size=len(edge))
    x = np.c_[np.concatenate([inside, edge]), np.repeat([1.0, 0.0], sizes)]
    bends = -(1 + flat) * np.pi**2 * solution(inside)
    means = np.repeat([1 / sizes[0], boundary / sizes[1]], sizes)
    return x, np.concatenate([bends, solution(edge)]), len(x) * means


def solve(dimension: int, name: str, seconds: float, seed: int) -> contest.Race:
    keras.utils.set_random_seed(seed)
    network = contest.mlp(dimension, 64)
    new = np.random.default_rng(1).uniform(size=(9000, dimension))
    error = contest.relative_error(network, new, solution(new))
    model, batch = Poisson(network), problem(dimension)
    return contest.run(model, OPTIMIZERS[name](), batch, error, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dimension", type=int, choices=(2, 5), default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", default="poisson.png")
    args = parser.parse_args()
    keras.config.set_floatx("float64")
    races = {o: solve(args.dimension, o, args.seconds, 0) for o in OPTIMIZERS}
    print(contest.table(races, [args.seconds / 4, args.seconds]))
    contest.plot(races, args.output, f"Poisson, {args.dimension}-D")
