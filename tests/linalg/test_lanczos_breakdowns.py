"""Exhausted Krylov spaces, and operators that are not finite."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.spectra import assert_pairs, operator, run, spectrum
from tfkfac.curvature import lanczos

NAN, INF = float("nan"), float("inf")

CASES = {
    "zero": np.zeros((12, 12)),
    "rank_1": spectrum([4.0] + [0.0] * 11),
    "rank_2": spectrum([5.0, -2.0] + [0.0] * 10),
    "identity": np.eye(12),
    "negative_identity": -3 * np.eye(12),
    "clusters": spectrum([1.0] * 4 + [2.0] * 5 + [-1.0] * 3),
    "near_clusters": spectrum(np.repeat([1, 1 + 1e-6, 2, 2 + 1e-5], 3)),
}
# The iteration replaces a zero or non-finite start by a random vector.
STARTS = [np.zeros(12), np.eye(12)[3], np.full(12, NAN)]


@tf.function
def all_pairs(matrix: tf.Tensor, start: tf.Tensor) -> Any:
    """2 n steps leave one step for each restart."""
    return lanczos(
        operator(matrix),
        12,
        24,
        start_vector=start,
        num_smallest=5,
        num_largest=7,
    )


@pytest.mark.parametrize("case", CASES)
def test_exhausted(case: str) -> None:
    matrix = CASES[case]
    want = np.linalg.eigvalsh(matrix)
    for start in STARTS:
        result = all_pairs(tf.constant(matrix), tf.constant(start, tf.float32))
        values, vectors = (t.numpy().astype(np.float64) for t in result)
        np.testing.assert_allclose(values, want, atol=1e-5)
        assert_pairs(matrix, values, vectors)
        assert (np.linalg.norm(vectors, axis=0) > 0.5).all()


@pytest.mark.parametrize("case", ["zero", "rank_2", "identity", "clusters"])
def test_exhausted_in_few_steps(case: str) -> None:
    """The pairs that were found are right; the ends converge first."""
    matrix = CASES[case]
    values, vectors = run(matrix, 9, num_smallest=2, num_largest=2)
    assert_pairs(matrix, values, vectors)
    want = np.linalg.eigvalsh(matrix)[[0, -1]]
    np.testing.assert_allclose(values[[0, -1]], want, atol=1e-5)


def test_too_few_steps_leave_zeros() -> None:
    """The first step finds the start vector; the restart uses the second."""
    start = np.eye(6)[2]
    values, vectors = run(
        np.diag(np.arange(1.0, 7)), 2, start_vector=start, num_largest=2
    )
    np.testing.assert_allclose(values, [0, 3], atol=1e-6)
    np.testing.assert_array_equal(vectors[:, 0], np.zeros(6))
    np.testing.assert_allclose(abs(vectors[:, 1]), start, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 10])
def test_size_one(steps: int) -> None:
    values, vectors = run([[-3.0]], steps)
    np.testing.assert_allclose(values, [-3.0], rtol=1e-6)
    np.testing.assert_allclose(abs(vectors), [[1.0]], rtol=1e-6)


@pytest.mark.parametrize(("value", "graph"), [(-INF, False), (NAN, True)])
def test_not_finite_does_not_raise(value: float, graph: bool) -> None:
    """With all elements, or a single element, not finite."""
    matrix = spectrum([3, 1, -2, 5])
    matrix[1, 2] = matrix[2, 1] = value
    for bad in (matrix, np.full((4, 4), value)):
        values, vectors = run(bad, 4, graph=graph, num_smallest=1)
        assert np.isnan(values).all()
        assert vectors.shape == (4, 4)
        assert not np.isfinite(vectors).any()


@settings(deadline=None, max_examples=10, derandomize=True)
@given(data=st.data(), size=st.integers(2, 12), seed=st.integers(0, 2**31 - 1))
def test_random_matrices(data: Any, size: int, seed: int) -> None:
    """n steps find all pairs."""
    noise = np.random.default_rng(seed).normal(size=(size, size))
    matrix = noise + noise.T
    largest = data.draw(st.integers(0, size))
    smallest = data.draw(st.integers(int(largest == 0), size - largest))
    values, vectors = run(
        matrix, size, seed=seed, num_largest=largest, num_smallest=smallest
    )
    true = np.linalg.eigvalsh(matrix)
    want = np.concatenate([true[:smallest], true[size - largest :]])
    scale = np.abs(true).max()
    np.testing.assert_allclose(values / scale, want / scale, atol=1e-5)
    assert_pairs(matrix, values, vectors)


@settings(deadline=None, max_examples=6, derandomize=True)
@given(data=st.data(), size=st.integers(1, 8))
def test_integer_matrices(data: Any, size: int) -> None:
    """Often singular, with repeated eigenvalues or bad start vectors."""
    numbers = st.integers(-2, 2)
    rows = st.lists(numbers, min_size=size, max_size=size)
    half = np.array(data.draw(st.lists(rows, min_size=size, max_size=size)))
    matrix, start = half + half.T, data.draw(rows)
    values, vectors = run(
        matrix, 2 * size, start_vector=start, num_largest=size
    )
    want = np.linalg.eigvalsh(matrix)
    scale = max(np.abs(want).max(), 1)
    np.testing.assert_allclose(values / scale, want / scale, atol=1e-5)
    assert_pairs(matrix, values, vectors)
