"""Draws and roots of the distributions, against their covariances in NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.fisher import (
    Bernoulli,
    Categorical,
    Distribution,
    Normal,
    Poisson,
)

Z = np.array([[0.3, -1.0, 1.5], [2.0, 0.0, -0.5]])
P = 1 / (1 + np.exp(-Z))
DRAWS = 40_000


# Every combination of three bits.
BITS = np.array(np.meshgrid(*[[0, 1]] * 3)).reshape(3, -1).T


def fisher(
    labels: Array,
    chance: Callable[[Array], Array],
    slope: Callable[[Array, Array], Array],
) -> Array:
    """`E[g g^T]` by enumeration."""
    slopes = [slope(labels, p) for p in P]
    return np.stack(
        [
            np.einsum("n,ni,nj->ij", chance(p), g, g)
            for p, g in zip(P, slopes, strict=True)
        ]
    )


def fisher_of_bits(slope: Callable[[Array, Array], Array]) -> Array:
    return fisher(BITS, lambda p: np.prod(np.where(BITS, p, 1 - p), -1), slope)


def fisher_of_classes(slope: Callable[[Array, Array], Array]) -> Array:
    return fisher(np.eye(3), lambda p: p / p.sum(), slope)


# Outputs, distribution, Fisher matrix.
CASES: dict[str, tuple[Array, Distribution, Array]] = {
    "normal": (Z, Normal(), np.stack([np.eye(3)] * 2)),
    "bits": (
        P,
        Bernoulli(),
        fisher_of_bits(lambda y, p: (p - y) / (p * (1 - p))),
    ),
    "bits, logits": (
        Z,
        Bernoulli(from_logits=True),
        fisher_of_bits(lambda y, p: p - y),
    ),
    # -log(p_y / sum p), as Keras normalises.
    "classes": (
        P,
        Categorical(),
        fisher_of_classes(lambda y, p: 1 / p.sum() - y / p),
    ),
    "classes, logits": (
        np.log(P),
        Categorical(from_logits=True),
        fisher_of_classes(lambda y, p: p / p.sum() - y),
    ),
    # The variance of a count is its mean m, and g = 1 - y/m.
    "counts": (P, Poisson(), np.stack([np.diag(1 / p) for p in P])),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_are_a_root(name: str) -> None:
    outputs, distribution, want = CASES[name]
    columns = np.stack(
        [distribution.column(tf.constant(outputs), i) for i in range(3)], -1
    )
    got = columns @ np.swapaxes(columns, -1, -2)
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_draws_have_mean_zero_and_that_covariance(name: str) -> None:
    outputs, distribution, want = CASES[name]
    many = np.repeat(outputs[:, None], DRAWS, 1)
    seed = tf.constant([3, 5], tf.int64)
    draws = np.asarray(distribution.sample(tf.constant(many), seed))
    size = np.sqrt(want.max())
    np.testing.assert_allclose(draws.mean(1), 0, atol=0.03 * size)
    got = np.einsum("bni,bnj->bij", draws, draws) / DRAWS
    assert_close(got, want, 0.05)
    again = distribution.sample(tf.constant(many), seed)
    np.testing.assert_array_equal(again, draws)
    other = distribution.sample(tf.constant(many), seed + 1)
    assert np.mean(np.asarray(other) == draws) < 0.95


@pytest.mark.parametrize(
    "distribution", [Bernoulli(), Categorical(), Poisson()]
)
@pytest.mark.parametrize("outputs", [[0.0, 1.0], [1.0, 0.0]])
def test_certain_predictions_are_finite(
    distribution: Distribution, outputs: list[float]
) -> None:
    z = tf.constant([outputs] * 100)
    drawn = distribution.sample(z, tf.constant([0, 1], tf.int64))
    assert np.isfinite(drawn).all()
    assert np.isfinite(distribution.column(z, 0)).all()
