"""The slopes of the example are those of its function."""

import numpy as np
import tensorflow as tf

import sobolev


def test_slopes() -> None:
    """By central differences."""
    x = np.random.default_rng(0).uniform(-1, 1, (50, 2))
    h = 1e-5 * np.eye(2)
    changes = [
        (sobolev.function(x + step) - sobolev.function(x - step)) / 2e-5
        for step in h
    ]
    slopes = sobolev.slopes(sobolev.function, tf.constant(x))
    np.testing.assert_allclose(slopes, np.stack(changes, 1), atol=1e-8)
