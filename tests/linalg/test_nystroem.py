"""Nystroem approximation against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.factors.low_rank import nystroem_half, probes

STACKS = pytest.mark.parametrize("stack", [(), (3,)])


@pytest.mark.parametrize(
    ("size", "rank"), [(2, 1), (7, 6), (50, 8), (70_000, 3)]
)
def test_probes_are_orthonormal(size: int, rank: int) -> None:
    """And no coordinate has a large norm."""
    for dtype, tolerance in ((tf.float64, 1e-11), (tf.float32, 1e-6)):
        columns = probes(size, rank, dtype)
        assert columns.shape == (size, rank)
        assert columns.dtype == dtype
        gram = tf.matmul(columns, columns, transpose_a=True)
        np.testing.assert_allclose(gram, np.eye(rank), atol=tolerance)
        assert tf.reduce_max(tf.abs(columns)) <= np.sqrt(2 / size) + 1e-9


def test_probes_never_change() -> None:
    """Saved and sent products depend on the probes."""
    a, b = 0.601500955, 0.371748034
    want = [[-a, -b], [b, -a], [0, 0], [b, -a], [-a, -b]]
    np.testing.assert_allclose(probes(5, 2, tf.float64), want, atol=1e-8)


def moments(size: int, rank: int, stack: tuple[int, ...]) -> Array:
    """Positive semi-definite matrices of a given rank."""
    rng = np.random.default_rng(size + rank)
    rows = rng.normal(size=(*stack, rank, size))
    return np.asarray(np.swapaxes(rows, -1, -2) @ rows)


def approximated(matrix: Array, rank: int, dtype: tf.DType) -> Array:
    columns = probes(matrix.shape[-1], rank, tf.float64)
    product = tf.cast(tf.cast(matrix @ columns, dtype), tf.float64)
    half = nystroem_half(product, columns, dtype).numpy()
    return np.asarray(half @ np.swapaxes(half, -1, -2))


@STACKS
@pytest.mark.parametrize("rank", [1, 5, 11])
def test_formula(rank: int, stack: tuple[int, ...]) -> None:
    """`Y (Omega^T Y)^+ Y^T`, which is at most the matrix."""
    matrix = moments(12, 30, stack)
    omega = probes(12, rank, tf.float64).numpy()
    product = matrix @ omega
    core = np.linalg.pinv(omega.T @ product)
    want = product @ core @ np.swapaxes(product, -1, -2)
    got = approximated(matrix, rank, tf.float64)
    assert_close(got, want, 1e-10)
    assert np.linalg.eigvalsh(matrix - got).min() > -1e-10
    assert np.abs(matrix - got).max() > 1e-3  # not exact


@STACKS
@pytest.mark.parametrize("rank", [0, 1, 4, 6])
def test_exact_up_to_its_rank(rank: int, stack: tuple[int, ...]) -> None:
    matrix = moments(20, rank, stack)
    for dtype, tolerance in ((tf.float64, 1e-9), (tf.float32, 1e-3)):
        got = approximated(matrix, 6, dtype)
        np.testing.assert_allclose(got, matrix, atol=tolerance)


def test_rounding_noise_of_half_precision_is_removed() -> None:
    """With a product rounded to 8 bits, of a matrix of lower rank."""
    matrix = moments(200, 10, ())
    columns = probes(200, 40, tf.float64)
    product = tf.cast(matrix @ columns, tf.bfloat16)
    half = nystroem_half(tf.cast(product, tf.float64), columns, tf.float32)
    got = tf.matmul(half, half, transpose_b=True)
    assert_close(got, matrix, 0.05)


def test_non_finite_input() -> None:
    columns = probes(9, 3, tf.float64)
    for value in (np.nan, np.inf):
        product = moments(9, 5, ()) @ columns.numpy()
        product[4, 1] = value
        half = nystroem_half(tf.constant(product), columns, tf.float64)
        assert not np.isfinite(half).all()
