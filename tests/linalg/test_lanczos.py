"""Lanczos: oracle, orthogonality, arguments."""

import functools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.reference import Array
from tests.support.spectra import assert_pairs, operator, run, spectrum
from tfkfac.curvature import lanczos
from tfkfac.linalg.lanczos import Lanczos, random_vector

DATA = pathlib.Path(__file__).parents[1] / "data"


@functools.cache
def oracle() -> dict[str, Array]:
    with np.load(DATA / "fosi_quadratic.npz") as data:
        return {k: data[k] for k in data.files}


# ---------------------------------------------------------------------- oracle
@pytest.mark.parametrize(
    ("dtype", "graph", "steps"),
    [
        ("float32", False, 32),
        ("float32", True, 56),
        ("float64", True, 32),
        ("float64", False, 60),
    ],
)
def test_oracle(dtype: str, graph: bool, steps: int) -> None:
    data = oracle()
    start = tf.constant(data["start_vector"], dtype)
    values, vectors = run(
        data["H"],
        steps,
        graph=graph,
        start_vector=start,
        num_smallest=3,
        num_largest=5,
    )
    tolerance = 1e-7 if dtype == "float32" else 1e-14
    want = data[f"lanczos{steps}/eigenvalues"]
    np.testing.assert_allclose(values, want, atol=100 * tolerance)
    overlap = np.sum(vectors * data[f"lanczos{steps}/eigenvectors"], 0)
    np.testing.assert_allclose(abs(overlap), 1, atol=5 * tolerance)


def test_all_ritz_values() -> None:
    data = oracle()
    values, _ = run(
        data["H"],
        32,
        start_vector=data["start_vector"],
        num_smallest=20,
        num_largest=12,
    )
    want = np.sort(data["lanczos32/all_ritz_values"])
    np.testing.assert_allclose(values, want, atol=2e-5)


def test_one_trace() -> None:
    calls = []

    def product(v: tf.Tensor) -> tf.Tensor:
        calls.append(v.shape)
        return v * tf.range(1.0, 13.0)

    values, _ = tf.function(lambda: lanczos(product, 12, 10, num_largest=1))()
    assert calls == [(12,)]
    np.testing.assert_allclose(values, [12.0], rtol=1e-3)


# ------------------------------------------------------------------- precision
@pytest.mark.slow
@pytest.mark.parametrize("top", [1e3, 1e6, 1e9])
def test_orthonormal(top: float) -> None:
    """Basis and Ritz vectors are orthonormal for every condition number.

    With `top` 1e9 the other eigenvalues vanish in rounding: some rows are zero.
    """
    scales = np.append(np.logspace(-6, 3, 1999), top).astype("float32")

    def product(v: tf.Tensor) -> tf.Tensor:
        return v * scales

    iteration = Lanczos(product, 2000, lambda i: random_vector(2000, 0, i + 1))
    result, matrices = iteration.run(random_vector(2000, 0, 0), 100)
    kept = result.kept.numpy().astype(np.float64)
    rows = np.concatenate(matrices).astype(np.float64)
    np.testing.assert_allclose(rows @ rows.T, np.diag(kept), atol=1e-6)
    assert kept.all() or top == 1e9
    values, vectors = lanczos(product, 2000, 100, num_largest=50)
    columns = vectors.numpy().astype(np.float64)
    np.testing.assert_allclose(columns.T @ columns, np.eye(50), atol=1e-6)
    np.testing.assert_allclose(values[-1], top, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scale(scale: float) -> None:
    """The scales of the operator and the start vector do not matter."""
    matrix = scale * spectrum(np.arange(1.0, 11))
    for start in (1e-12, 1e12):
        values, vectors = run(
            matrix, 10, start_vector=np.full(10, start), num_largest=10
        )
        np.testing.assert_allclose(values / scale, np.arange(1, 11), rtol=1e-5)
        assert_pairs(matrix, values, vectors)


# ------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("smallest", "largest", "want"),
    [(0, 3, [5, 6, 7]), (3, 0, [0, 1, 2]), (2, 1, [0, 1, 7])],
)
def test_order(smallest: int, largest: int, want: list[int]) -> None:
    values, vectors = lanczos(
        operator(np.diag(np.arange(8.0))),
        8,
        8,
        num_smallest=smallest,
        num_largest=largest,
    )
    assert values.dtype == vectors.dtype == tf.float32
    assert vectors.shape == (8, 3)
    np.testing.assert_allclose(values, want, atol=1e-5)
    np.testing.assert_allclose(abs(vectors), np.eye(8)[:, want], atol=1e-4)


@pytest.mark.parametrize(
    ("size", "steps", "smallest", "count"),
    [(30, 20, 0, 10), (30, 20, 3, 13), (30, 6, 2, 6), (4, 20, 1, 4)],
)
def test_default_number(
    size: int, steps: int, smallest: int, count: int
) -> None:
    values, vectors = run(
        np.diag(np.arange(size)), steps, num_smallest=smallest
    )
    assert values.shape == (count,)
    assert vectors.shape == (size, count)


def test_seed() -> None:
    matrix = spectrum(np.arange(1.0, 31))
    first, again, other = (run(matrix, 4, seed=s)[0] for s in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1e-3


def test_products_of_numpy() -> None:
    matrix = spectrum([4, 1, -2])
    values, _ = lanczos(lambda v: matrix @ v.numpy()[:, None], 3, 3)
    np.testing.assert_allclose(values, [-2, 1, 4], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("size", 0, ValueError),
        ("size", 2.5, TypeError),
        ("steps", 0, ValueError),
        ("steps", True, TypeError),
        ("num_largest", -1, ValueError),
        ("num_largest", 6, ValueError),
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


def test_no_pairs() -> None:
    with pytest.raises(ValueError, match="`num_largest` and `num_smallest`"):
        lanczos(lambda v: v, 5, 5, num_largest=0)
