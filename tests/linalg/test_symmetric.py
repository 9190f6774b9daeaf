"""Eigen-decompositions of matrices as they come; what is finite."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.spectra import gram
from tfkfac.linalg.symmetric import (
    all_finite,
    eigh,
    rounding,
)

NAN, INF = float("nan"), float("inf")
DTYPES = ["float32", "float64"]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("graph", [True, False])
def test_not_finite_comes_out_as_not_finite(graph: bool, value: float) -> None:
    """No exception, which would end the training."""
    matrix = gram(4, 9)
    matrix[1, 2] = matrix[2, 1] = value

    def decompose(m: Any) -> Any:
        values, vectors = eigh(m)
        assert vectors.shape == m.shape
        return values

    run = tf.function(decompose) if graph else decompose
    assert np.isnan(run(tf.constant(matrix)).numpy()).all()


# ----------------------------------------------------------------------- eigen
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rank"), [(1, 1), (2, 1), (6, 9), (30, 4), (300, 40)]
)
def test_eigh(size: int, rank: int, dtype: str) -> None:
    """The matrix again, orthogonal vectors, no negative values."""
    matrix = gram(size, rank, dtype=dtype)
    values, vectors = (t.numpy() for t in eigh(tf.constant(matrix)))
    assert values.dtype == vectors.dtype == dtype
    assert (values >= 0).all()
    assert (np.diff(values) >= 0).all()
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    assert_close((vectors * values) @ vectors.T, matrix, tolerance)
    assert_close(vectors.T @ vectors, np.eye(size), tolerance)
    assert np.count_nonzero(values > 1e-4 * values[-1]) == min(size, rank)


def test_eigh_of_a_batch() -> None:
    stack = np.stack([gram(3, 9, seed) for seed in range(2)])
    values, vectors = (t.numpy() for t in eigh(tf.constant(stack)))
    again = np.einsum("bik,bk,bjk->bij", vectors, values, vectors)
    assert_close(again, stack, 1e-5)


def test_eigh_clamps_what_is_negative() -> None:
    values, _ = eigh(tf.constant(np.diag([-2.0, 3.0])))
    np.testing.assert_array_equal(values, [0.0, 3.0])


def test_eigh_looks_at_both_halves() -> None:
    """The kernel reads one triangle; rounding must not be lost in it."""
    skewed = np.array([[2.0, 0.5], [0.1, 1.0]], "float32")
    values, _ = eigh(tf.constant(skewed))
    want = np.linalg.eigvalsh((skewed + skewed.T) / 2)
    np.testing.assert_allclose(values, want, rtol=1e-6)


def test_eigh_of_zero() -> None:
    values, vectors = eigh(tf.zeros([3, 3]))
    np.testing.assert_array_equal(values, np.zeros(3))
    assert_close(vectors.numpy().T @ vectors, np.eye(3), 1e-6)


# ------------------------------------------------------------------ all_finite
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *DTYPES])
def test_all_finite(dtype: str) -> None:
    fine = tf.ones([2, 3], dtype)
    assert bool(all_finite([fine, tf.zeros([0], dtype), fine]))
    for bad in ([NAN, 0], [INF, 1], [-INF, 1], [INF, -INF], [NAN, INF]):
        values = tf.constant(bad, dtype)
        assert not bool(all_finite([fine, values]))
        assert not bool(all_finite([values, fine]))


def test_all_finite_of_several_dtypes() -> None:
    fine = [tf.ones([2], dtype) for dtype in ("float32", "float64")]
    assert bool(all_finite(fine))
    assert not bool(all_finite([*fine, tf.constant(NAN, tf.float16)]))


def test_all_finite_does_not_add_tensors_up() -> None:
    """Infinities of two tensors do not cancel, large sums do not overflow."""
    assert not bool(all_finite([tf.constant(INF), tf.constant(-INF)]))
    assert bool(all_finite([tf.constant(3e38)] * 5))
    assert bool(all_finite([tf.fill([99], tf.constant(6e4, tf.float16))]))


def test_all_finite_in_a_graph() -> None:
    check = tf.function(lambda x: all_finite([x]))
    assert bool(check(tf.constant([1.0])))
    assert not bool(check(tf.constant([NAN])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(dtype: str) -> None:
    assert rounding(tf.as_dtype(dtype)) == np.finfo(dtype).eps
