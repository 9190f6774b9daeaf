"""`LowRank` factors, stored as sketches, and `Limit`."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.factors.test_factors import Case
from tests.support.harness import assert_close
from tfkfac.factors import Dense, Limit, LowRank, Stack


def test_counts() -> None:
    single, stack = LowRank(20, 6), LowRank(15, 5, (3,))
    assert (single.multiplications, stack.multiplications) == (240, 450)
    assert (single.whole_size, stack.whole_size) == (0, 0)


def test_limit() -> None:
    """Larger matrices are approximated; the rank is below the size."""
    limit = Limit(10, 4)
    assert limit.matrix(10) == Dense(10)
    assert limit.matrix(11) == LowRank(11, 4)
    assert limit.stack(3, 10) == Stack(3, 10)
    assert limit.stack(3, 11) == LowRank(11, 4, (3,))
    assert Limit(1, 64).matrix(2) == LowRank(2, 1)
    assert Limit(None, 4).matrix(10**6) == Dense(10**6)
    assert Limit().stack(2, 10**6) == Stack(2, 10**6)


@pytest.mark.parametrize("name", ["wide", "wide stack"])
def test_explained(name: str) -> None:
    """The fraction is 1 for 2 or 4 rows, fewer than the rank."""
    for count in (1, 2):
        case = Case(name, count)
        assert_close(case.factor.as_matrix(case.value), case.exact, 1e-9)
        assert float(case.factor.explained(case.value)) == pytest.approx(1)
    case = Case(name)
    _, missing = case.low_rank()
    trace = np.trace(case.exact, axis1=-2, axis2=-1)
    want = 1 - np.sum(missing) / np.sum(trace)
    assert 0.3 < want < 0.95
    assert float(case.factor.explained(case.value)) == pytest.approx(want)
    assert float(case.factor.explained(tf.zeros_like(case.value))) == 0
    # `rest I` restores the trace.
    shown = case.factor.shown(case.value)
    assert_close(np.trace(shown, axis1=-2, axis2=-1), trace, 1e-12)


def test_multiply_takes_any_number_of_rows() -> None:
    """The number of rows may be dynamic."""
    case = Case("wide")
    damping = np.float64(0.3)
    inverse = case.factor.inverse(case.value, tf.constant(damping))
    signature = [tf.TensorSpec([None, case.size], tf.float64)]

    @tf.function(input_signature=signature)
    def multiply(rows: tf.Tensor) -> tf.Tensor:
        return case.factor.multiply(inverse, rows, "right")

    for count in (0, 1, 30):
        rows = case.rng.normal(size=(count, case.size))
        want = case.solution(damping, rows, "right")
        np.testing.assert_allclose(multiply(rows), want, atol=1e-9)


def test_eigenvectors_are_orthonormal_or_zero() -> None:
    """Two rows have two eigenvectors; the others are zero, not noise."""
    for count, rank in ((1, 2), (40, 6)):
        case = Case("wide", count)
        for dtype in (tf.float64, tf.float32):
            value = case.factor.gram(tf.cast(case.rows, dtype))
            vectors = case.factor.eigen(value)[""].numpy()
            want = np.diag(np.arange(6) >= 6 - rank)
            np.testing.assert_allclose(vectors.T @ vectors, want, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_fewer_rows_than_columns(side: Any) -> None:
    """Rounding errors add no directions, in float32 and float64."""
    for count in (1, 2):
        case = Case("wide", count)
        case.matrix = case.exact
        gradient = case.gradient(side)
        damping = np.float64(0.1)  # TensorFlow casts a Python float to float32.
        want = case.solution(damping, gradient, side)
        for dtype, tolerance in ((tf.float64, 1e-9), (tf.float32, 1e-4)):
            case.value = case.factor.gram(tf.cast(case.rows, dtype))
            cast = gradient.astype(dtype.as_numpy_dtype)
            for got in (
                case.by_eigen(damping, cast, side),
                case.by_inverse(damping, cast, side),
            ):
                assert got.dtype == dtype
                assert_close(got, want, tolerance)


def test_inverse_in_half_precision() -> None:
    """The relative error is at most 2 %, at any scale of the inverse."""
    for scale in (1e-8, 1.0, 1e8):
        case = Case("wide")
        case.value = tf.cast(scale * case.value, tf.float32)
        case.matrix = scale * case.matrix
        damping = np.float64(0.3 * scale)
        inverse = case.factor.inverse(case.value, tf.cast(damping, tf.float32))
        stored = case.factor.for_products(
            {k: tf.cast(v, tf.bfloat16) for k, v in inverse.items()}, tf.float32
        )
        gradient = case.gradient("left")
        cast = tf.constant(gradient, tf.float32)
        got = case.factor.multiply(stored, cast, "left")
        assert_close(got, case.solution(damping, gradient, "left"), 0.02)
