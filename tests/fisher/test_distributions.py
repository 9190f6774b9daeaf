"""Samples and roots of the distributions, against covariances in NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.fisher import Bernoulli, Categorical, Distribution, Normal, Poisson

Z = np.array([[0.3, -1.0, 1.5], [2.0, 0.0, -0.5]])
P = 1 / (1 + np.exp(-Z))
SAMPLES = 40_000


# All combinations of three bits.
BITS = np.array(np.meshgrid(*[[0, 1]] * 3)).reshape(3, -1).T


def fisher(
    labels: Array,
    probability: Callable[[Array], Array],
    gradient: Callable[[Array, Array], Array],
) -> Array:
    """`E[g g^T]` by enumeration of all labels."""
    gradients = [gradient(labels, p) for p in P]
    return np.stack(
        [
            np.einsum("n,ni,nj->ij", probability(p), g, g)
            for p, g in zip(P, gradients, strict=True)
        ]
    )


def fisher_of_bits(gradient: Callable[[Array, Array], Array]) -> Array:
    return fisher(
        BITS, lambda p: np.prod(np.where(BITS, p, 1 - p), -1), gradient
    )


def fisher_of_classes(gradient: Callable[[Array, Array], Array]) -> Array:
    return fisher(np.eye(3), lambda p: p / p.sum(), gradient)


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
    # The loss is -log(p_y / sum p), because Keras normalises probabilities.
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
def test_columns_and_samples(name: str) -> None:
    """Columns are a root of the Fisher matrix, samples have its covariance."""
    outputs, distribution, want = CASES[name]
    columns = np.stack(
        [distribution.column(tf.constant(outputs), i) for i in range(3)], -1
    )
    assert_close(columns @ np.swapaxes(columns, -1, -2), want, 1e-6)
    repeated = np.repeat(outputs[:, None], SAMPLES, 1)
    seed = tf.constant([3, 5], tf.int64)
    samples = np.asarray(distribution.sample(tf.constant(repeated), seed))
    size = np.sqrt(want.max())
    np.testing.assert_allclose(samples.mean(1), 0, atol=0.03 * size)
    got = np.einsum("bni,bnj->bij", samples, samples) / SAMPLES
    assert_close(got, want, 0.05)
    same_seed = distribution.sample(tf.constant(repeated), seed)
    np.testing.assert_array_equal(same_seed, samples)
    other_seed = distribution.sample(tf.constant(repeated), seed + 1)
    assert np.mean(np.asarray(other_seed) == samples) < 0.95


@pytest.mark.parametrize(
    "distribution", [Bernoulli(), Categorical(), Poisson()]
)
@pytest.mark.parametrize("outputs", [[0.0, 1.0], [1.0, 0.0]])
def test_certain_predictions_are_finite(
    distribution: Distribution, outputs: list[float]
) -> None:
    z = tf.constant([outputs] * 100)
    samples = distribution.sample(z, tf.constant([0, 1], tf.int64))
    assert np.isfinite(samples).all()
    assert np.isfinite(distribution.column(z, 0)).all()
