"""Eigenvalues, inverses, products and packing of symmetric matrices."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.harness import assert_close
from tests.support.spectra import gram, spectrum
from tfkfac.linalg.symmetric import (
    band_shapes,
    bands,
    damped_inverse,
    damped_inverse_root,
    eigh,
    from_bands,
)

few = settings(deadline=None, max_examples=8, derandomize=True)
DTYPES = st.sampled_from(["float32", "float64"])
SIZES = st.sampled_from([1, 2, 5, 9, 383, 384, 401])


def damping(value: Any, dtype: str = "float32") -> tf.Tensor:
    return tf.constant(value, dtype)


@few
@given(st.sampled_from([(1, 1), (6, 9), (200, 40)]), DTYPES)
def test_eigh(shape: tuple[int, int], dtype: str) -> None:
    """V diag(values) V^T = M, V^T V = I, values >= 0, by both triangles."""
    stack = np.stack([gram(*shape, i, dtype) for i in range(2)])
    stack[1] *= -1 if shape == (1, 1) else 1
    size, skewed = shape[0], stack.copy()
    if size > 1:  # TensorFlow's kernel reads one triangle only.
        skewed[:, 0, 1] += 0.25
        skewed[:, 1, 0] -= 0.25
    values, vectors = (t.numpy() for t in eigh(tf.constant(skewed)))
    assert values.dtype == vectors.dtype == dtype
    assert (values >= 0).all()
    assert (np.diff(values) >= 0).all()
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    product = (vectors * values[:, None]) @ vectors.swapaxes(1, 2)
    assert_close(
        product, np.maximum(stack, 0) if size == 1 else stack, tolerance
    )
    gram_ = vectors.swapaxes(1, 2) @ vectors
    assert_close(gram_, np.broadcast_to(np.eye(size), gram_.shape), tolerance)


# --------------------------------------------------------------------- inverse
@few
@given(SIZES, DTYPES)
def test_inverse_and_root(size: int, dtype: str) -> None:
    """For one damping per matrix; the root is `L^-T` of the Cholesky factor.

    Rounding may leave a matrix slightly asymmetric.
    """
    stack = np.stack([[gram(size, 3 * size, i, dtype)] for i in range(2)])
    shifts = np.array([[0.1], [2.0]])
    damped = stack + shifts[..., None, None] * np.eye(size)
    if size > 1:
        stack[..., 0, 1] += 0.25
        stack[..., 1, 0] -= 0.25
    arguments = tf.constant(stack), tf.constant(shifts, dtype)
    inverse = damped_inverse(*arguments).numpy()
    root = damped_inverse_root(*arguments).numpy()
    lower = np.linalg.cholesky(damped.astype(np.float64))
    assert inverse.dtype == root.dtype == dtype
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    assert_close(inverse, np.linalg.inv(damped), tolerance)
    assert_close(root, np.linalg.inv(lower).swapaxes(-1, -2), tolerance)
    np.testing.assert_array_equal(inverse, inverse.swapaxes(-1, -2))
    np.testing.assert_array_equal(root, np.triu(root))


@pytest.mark.parametrize("shift", [1e-2, 1e-8])
def test_block_inversion_is_as_accurate_as_solving(shift: float) -> None:
    """Errors are as small as for solving in the same precision.

    The spectrum spans eight decades, more than float32 resolves.
    """
    matrix = spectrum(np.logspace(0, -8, 500)).astype("float32")
    floor = 4 * 2.0**-23 * np.trace(matrix, dtype=np.float64)
    added = np.asarray(max(shift, floor) * np.eye(500), "float32")
    want = np.linalg.inv((matrix + added).astype(np.float64))
    got = damped_inverse(tf.constant(matrix), damping(shift)).numpy()
    root = tf.linalg.cholesky(matrix + added)  # NumPy's would be in float64
    solved = tf.linalg.cholesky_solve(root, tf.eye(500)).numpy()
    assert np.linalg.norm(got - want) < 2 * np.linalg.norm(solved - want)


@pytest.mark.parametrize(
    ("size", "rank", "scale"), [(1, 1, 1e12), (3, 2, 1e-12), (500, 1, 1e-12)]
)
def test_singular_matrix_without_damping(
    size: int, rank: int, scale: float
) -> None:
    """The inverse is finite, positive and limited by rounding."""
    matrix = (np.float32(scale) * gram(size, rank)).astype("float32")
    got = damped_inverse(tf.constant(matrix), damping(0.0)).numpy()
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, got.T)
    wide = got.astype(np.float64)
    values = np.linalg.eigvalsh(wide)
    assert values[0] > 0
    if rank < size:
        largest = 1 / (4 * 2.0**-23 * np.trace(matrix, dtype=np.float64))
        assert 0.5 < values[-1] / largest < 2
    # M (M + tiny I)^-1 M = M up to rounding; compare directions.
    kept = matrix @ wide @ matrix
    norms = np.linalg.norm(kept) * np.linalg.norm(matrix.astype(np.float64))
    assert np.sum(kept * matrix) > 0.98 * norms


def test_zero_matrices() -> None:
    """Without damping the inverse is I, with damping I / damping."""
    identity = np.broadcast_to(np.eye(2), (3, 2, 2))
    for shift, scale in ((0.0, 1), (0.25, 2)):
        arguments = tf.zeros([3, 2, 2]), tf.fill([3], shift)
        inverse = damped_inverse(*arguments)
        root = damped_inverse_root(*arguments)
        np.testing.assert_allclose(inverse, scale**2 * identity, rtol=1e-6)
        np.testing.assert_allclose(root, scale * identity, rtol=1e-6)


def test_inverse_of_an_indefinite_matrix_is_nan() -> None:
    """Other matrices of the batch are not affected."""
    stack = np.stack([np.diag([3.0, 1.0]), np.diag([-3.0, 1.0])])
    got = damped_inverse(tf.constant(stack), tf.zeros(2, tf.float64)).numpy()
    assert_close(got[0], np.diag([1 / 3, 1.0]), 1e-12)
    assert np.isnan(got[1]).all()


# -------------------------------------------------------- products, triangles
@few
@given(st.integers(1, 50))
def test_sums_of_products_by_bands(size: int) -> None:
    rng = np.random.default_rng(size)
    first, second = rng.normal(size=(2, 7, size))
    parts = [bands(tf.constant(rows)) for rows in (first, second)]
    assert [tuple(p.shape) for p in parts[0]] == band_shapes(size)
    got = np.array(from_bands([a + b for a, b in zip(*parts, strict=True)]))
    want = first.T @ first + second.T @ second
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(got, got.T)
