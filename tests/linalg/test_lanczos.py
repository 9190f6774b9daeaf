"""Lanczos: oracle, orthogonality, exhausted Krylov spaces, arguments."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.spectra import assert_pairs, operator, run, spectrum
from tfkfac.curvature import lanczos

DATA = pathlib.Path(__file__).parents[1] / "data" / "fosi_quadratic.npz"
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "graph", "steps"), [("float32", True, 56), ("float64", False, 32)]
)
def test_oracle(dtype: str, graph: bool, steps: int) -> None:
    with np.load(DATA) as file:
        data = {k: file[k] for k in file.files}
    values, vectors = run(
        data["H"],
        steps,
        graph=graph,
        start_vector=tf.constant(data["start_vector"], dtype),
        num_smallest=3,
        num_largest=5,
    )
    tolerance = 1e-7 if dtype == "float32" else 1e-14
    want = data[f"lanczos{steps}/eigenvalues"]
    np.testing.assert_allclose(values, want, atol=100 * tolerance)
    overlap = np.sum(vectors * data[f"lanczos{steps}/eigenvectors"], 0)
    np.testing.assert_allclose(abs(overlap), 1, atol=5 * tolerance)


# ------------------------------------------------------ exhausted Krylov spaces
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


def test_too_few_steps_leave_zeros() -> None:
    """The first step exhausts the start vector; the restart uses the second."""
    start = np.eye(6)[2]
    values, vectors = run(
        np.diag(np.arange(1.0, 7)), 2, start_vector=start, num_largest=2
    )
    np.testing.assert_allclose(values, [0, 3], atol=1e-6)
    np.testing.assert_array_equal(vectors[:, 0], np.zeros(6))
    np.testing.assert_allclose(abs(vectors[:, 1]), start, atol=1e-6)


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
@given(data=st.data(), size=st.integers(1, 12), seed=st.integers(0, 2**31 - 1))
def test_random_matrices(data: Any, size: int, seed: int) -> None:
    """n steps return all pairs, in ascending order, at any scale."""
    noise = np.random.default_rng(seed).normal(size=(size, size))
    matrix = data.draw(st.sampled_from([1e-12, 1.0, 1e12])) * (noise + noise.T)
    largest = data.draw(st.integers(0, size))
    smallest = data.draw(st.integers(int(largest == 0), size - largest))
    values, vectors = run(
        matrix,
        size,
        start_vector=np.full(size, data.draw(st.sampled_from([1e-12, 1e12]))),
        seed=seed,
        num_largest=largest,
        num_smallest=smallest,
    )
    true = np.linalg.eigvalsh(matrix)
    want = np.concatenate([true[:smallest], true[size - largest :]])
    scale = np.abs(true).max()
    np.testing.assert_allclose(values / scale, want / scale, atol=1e-5)
    assert_pairs(matrix, values, vectors)


# ------------------------------------------------------------------- arguments
def test_product_is_traced_once() -> None:
    calls = []

    def product(v: tf.Tensor) -> tf.Tensor:
        calls.append(v.shape)
        return v * tf.range(1.0, 13.0)

    values, _ = tf.function(lambda: lanczos(product, 12, 10, num_largest=1))()
    assert calls == [(12,)]
    np.testing.assert_allclose(values, [12.0], rtol=1e-3)


@pytest.mark.parametrize(
    ("size", "steps", "smallest", "count"),
    [(30, 20, 3, 13), (30, 6, 2, 6), (4, 20, 1, 4)],
)
def test_default_number(
    size: int, steps: int, smallest: int, count: int
) -> None:
    values, vectors = lanczos(
        operator(np.diag(np.arange(size))), size, steps, num_smallest=smallest
    )
    assert values.dtype == vectors.dtype == tf.float32
    assert values.shape == (count,)
    assert vectors.shape == (size, count)


def test_seed() -> None:
    matrix = spectrum(np.arange(1.0, 31))
    first, again, other = (run(matrix, 4, seed=s)[0] for s in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("size", 0, ValueError),
        ("size", 2.5, TypeError),
        ("steps", 0, ValueError),
        ("steps", True, TypeError),
        ("num_largest", -1, ValueError),
        ("num_largest", 6, ValueError),
        ("num_largest", 0, ValueError),  # no pairs
        ("num_smallest", -1, ValueError),
        ("num_smallest", 4, ValueError),
        ("num_smallest", None, TypeError),
        ("start_vector", np.ones(4), ValueError),
        ("start_vector", np.ones((5, 1)), ValueError),
    ],
)
def test_wrong_arguments(name: str, value: Any, error: type) -> None:
    arguments = {"size": 5, "steps": 5, "num_largest": 2} | {name: value}
    with pytest.raises(error, match=f"`{name}`"):
        lanczos(lambda v: v, **arguments)
