"""Matrices of known spectra, and checks of what Lanczos finds of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.reference import Array
from tfkfac.curvature import lanczos


def operator(matrix: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda v: tf.linalg.matvec(tf.cast(matrix, v.dtype), v)


def spectrum(values: Any) -> Array:
    """A symmetric matrix with these eigenvalues."""
    noise = np.random.default_rng(0).normal(size=(len(values),) * 2)
    basis = np.linalg.qr(noise)[0]
    return np.asarray((basis * np.asarray(values)) @ basis.T)


def gram(size: int, rank: int, seed: int = 0, dtype: str = "float32") -> Array:
    """Second moments of `rank` examples, summed in `dtype`."""
    rows = np.random.default_rng(seed).normal(size=(rank, size)).astype(dtype)
    return np.asarray(rows.T @ rows / np.asarray(rank, dtype))


def run(matrix: Any, steps: int, *, graph: bool = False, **kwargs: Any) -> Any:
    """Values and vectors of a matrix, as float64 arrays."""

    def pairs() -> Any:
        return lanczos(operator(matrix), len(matrix), steps, **kwargs)

    found = tf.function(pairs)() if graph else pairs()
    return tuple(t.numpy().astype(np.float64) for t in found)


def assert_pairs(matrix: Array, values: Array, vectors: Array) -> None:
    """Ascending, orthonormal or zero, and eigenpairs of the matrix."""
    scale = max(float(np.abs(matrix).max()), 1e-30)
    assert (np.diff(values) >= 0).all()
    lengths = np.linalg.norm(vectors, axis=0)
    there = lengths > 0.5
    np.testing.assert_allclose(lengths, there, atol=1e-5)
    assert (values[~there] == 0).all()
    gram = vectors.T @ vectors
    np.testing.assert_allclose(gram, np.diag(there * 1.0), atol=2e-6)
    residual = matrix @ vectors - vectors * values
    np.testing.assert_allclose(residual / scale, 0, atol=1e-5)
