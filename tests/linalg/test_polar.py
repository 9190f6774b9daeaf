"""Polar factors against NumPy's singular values."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support.reference import Array
from tfkfac.linalg.polar import polar_factors


def matrix(*shape: int, least: float = 0.05, rank: int | None = None) -> Array:
    """A stack of matrices with singular values from `least` to 1."""
    rng = np.random.default_rng(sum(shape))
    u, s, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = np.geomspace(1, least, s.shape[-1])
    return np.asarray((u * s)[..., :rank] @ vt[..., :rank, :])


def by_svd(matrix: Array) -> Array:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vt)


def factors(
    *matrices: Array,
    block: int | None = None,
    iterations: int = 7,
    dtype: Any = "float32",
) -> list[Array]:
    tensors = [tf.constant(x, dtype) for x in matrices]
    results = polar_factors(tensors, block, iterations)
    for result, x in zip(results, tensors, strict=True):
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
    return [np.array(result, "float64") for result in results]


@pytest.mark.parametrize(
    ("dtype", "iterations", "tolerance"),
    [("float32", 7, 1e-5), ("float64", 12, 1e-11)],
)
def test_by_singular_values(
    dtype: str, iterations: int, tolerance: float
) -> None:
    shapes = [(5, 5), (9, 4), (4, 9), (3, 6, 4), (2, 3, 4, 6), (70, 40)]
    matrices = [matrix(*shape) for shape in shapes]
    results = factors(*matrices, iterations=iterations, dtype=dtype)
    for result, x in zip(results, matrices, strict=True):
        np.testing.assert_allclose(result, by_svd(x), atol=tolerance)


@pytest.mark.parametrize("iterations", [5, 7, 12])
def test_all_but_small_directions_have_length_1(iterations: int) -> None:
    """From a thousandth of the norm on; zero directions stay below 0.01.

    Rounding makes negative eigenvalues of the zero ones of a Gram matrix.
    """
    tolerance = 0.125 if iterations == 5 else 2e-3
    for shape, rank in [((60, 32), 32), ((60, 32), 5), ((8, 40), 1)]:
        x = matrix(*shape, least=4e-3, rank=rank)
        (result,) = factors(x, iterations=iterations)
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        assert s[rank - 1] > 1.01e-3 * np.linalg.norm(x)
        lengths = u[:, :rank].T @ result @ vt[:rank].T
        np.testing.assert_allclose(lengths, np.eye(rank), atol=tolerance)
        rest = result - u[:, :rank] @ lengths @ vt[:rank]
        assert np.linalg.norm(rest) < 1e-2


def in_low_precision(multiply: Any) -> Any:
    """Round inputs to 10 bits as TensorFloat-32 on GPUs does."""

    def product(a: tf.Tensor, b: tf.Tensor, **kwargs: Any) -> tf.Tensor:
        rounded = [
            tf.bitcast(
                (tf.bitcast(x, tf.int32) + (1 << 12)) & ~((1 << 13) - 1),
                tf.float32,
            )
            for x in (a, b)
        ]
        return multiply(*rounded, **kwargs)

    return product


@pytest.mark.parametrize(("iterations", "most"), [(5, 1.5), (12, 1.01)])
def test_in_tensor_float_32(iterations: int, most: float) -> None:
    """Rounding errors fill zero directions, but no direction gets too long."""
    matrices = [matrix(100, 32, rank=5), matrix(32, 32, rank=1)]
    gpus = mock.patch.object(tf.config, "list_logical_devices", lambda _: [0])
    products = in_low_precision(tf.matmul)
    with gpus, mock.patch.object(tf, "matmul", products):
        results = factors(*matrices, iterations=iterations)
    for result in results:
        assert 0.8 < np.linalg.norm(result, 2) < most


@pytest.mark.parametrize(
    ("columns", "block", "width"),
    [
        (32, 32, 32),
        (48, 32, 24),
        (10, 32, 10),
        (37, 32, 19),  # a prime: the last block is padded by one column
        (101, 10, 10),
        (5, 1, 1),
    ],
)
def test_blocks_of_columns(columns: int, block: int, width: int) -> None:
    matrices = [matrix(45, columns), matrix(2, 30, columns)]
    results = factors(*matrices, block=block, iterations=12, dtype="float64")
    for result, x in zip(results, matrices, strict=True):
        for start in range(0, columns, width):
            part = np.s_[..., start : start + width]
            want = by_svd(x[part])
            np.testing.assert_allclose(result[part], want, atol=1e-6)


def test_vectors_are_divided_by_their_norm() -> None:
    vectors = [matrix(1, 9), matrix(9, 1), matrix(3, 4, 1)]
    vectors.append(1e-15 * matrix(1, 5))
    results = factors(*vectors, iterations=1)
    for result, vector in zip(results, vectors, strict=True):
        norm = np.linalg.norm(vector, axis=(-2, -1), keepdims=True)
        np.testing.assert_allclose(result, vector / norm, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_scale_does_not_matter(scale: float) -> None:
    x = matrix(6, 4)
    results = factors(scale * x, x, iterations=5)
    np.testing.assert_allclose(*results, atol=1e-5)


def test_zeros_stay_zero() -> None:
    """Also in a stack with nonzero matrices."""
    x = matrix(2, 6, 4)
    x[0] = 0
    (result,) = factors(x)
    assert not result[0].any()
    np.testing.assert_allclose(result[1], by_svd(x[1]), atol=1e-5)
    zeros = np.zeros((3, 1)), np.zeros((4, 4)), np.zeros((1, 3))
    assert not any(result.any() for result in factors(*zeros))
