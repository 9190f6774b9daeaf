"""Polar factors against NumPy's singular values."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support.reference import Array
from tfkfac.linalg.polar import block_width, polar_factors


def matrix(*shape: int, least: float = 0.05, rank: int | None = None) -> Array:
    """Singular values from `least` to 1, of each matrix of a stack."""
    rng = np.random.default_rng(sum(shape))
    u, s, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = np.geomspace(1, least, s.shape[-1])
    return np.asarray((u * s)[..., :rank] @ vt[..., :rank, :])


def by_svd(matrix: Array, rank: int | None = None) -> Array:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u[..., :rank] @ vt[..., :rank, :])


def factors(
    *matrices: Array,
    block: int | None = None,
    iterations: int = 7,
    dtype: Any = "float32",
) -> list[Array]:
    tensors = [tf.constant(one, dtype) for one in matrices]
    found = polar_factors(tensors, block, iterations)
    for got, given in zip(found, tensors, strict=True):
        assert (got.shape, got.dtype) == (given.shape, given.dtype)
    return [np.array(one, "float64") for one in found]


GIVEN = [
    matrix(*shape)
    for shape in [(5, 5), (9, 4), (4, 9), (3, 6, 4), (2, 3, 4, 6), (70, 40)]
]


@pytest.mark.parametrize(
    ("dtype", "iterations", "room"),
    [("float32", 7, 1e-5), ("float64", 7, 1e-7), ("float64", 12, 1e-11)],
)
def test_by_singular_values(dtype: str, iterations: int, room: float) -> None:
    found = factors(*GIVEN, iterations=iterations, dtype=dtype)
    for got, given in zip(found, GIVEN, strict=True):
        np.testing.assert_allclose(got, by_svd(given), atol=room)


@pytest.mark.parametrize("iterations", [5, 7, 12])
def test_all_but_small_directions_are_of_one_length(iterations: int) -> None:
    """Of a thousandth of the norm on; where there is none, none comes up.

    Rounding makes negative eigenvalues of the zero ones of a Gram matrix.
    """
    room = 0.125 if iterations == 5 else 2e-3
    for shape, rank in [((60, 32), 32), ((60, 32), 5), ((8, 40), 1)]:
        given = matrix(*shape, least=4e-3, rank=rank)
        (got,) = factors(given, iterations=iterations)
        u, s, vt = np.linalg.svd(given, full_matrices=False)
        assert s[rank - 1] > 1.01e-3 * np.linalg.norm(given)
        lengths = u[:, :rank].T @ got @ vt[:rank].T
        np.testing.assert_allclose(lengths, np.eye(rank), atol=room)
        rest = got - u[:, :rank] @ lengths @ vt[:rank]
        assert np.linalg.norm(rest) < 1e-2


def in_low_precision(below: Any) -> Any:
    """Products of numbers with 10 bits, as GPUs have them."""

    def product(a: tf.Tensor, b: tf.Tensor, **kwargs: Any) -> tf.Tensor:
        short = [
            tf.bitcast(
                (tf.bitcast(x, tf.int32) + (1 << 12)) & ~((1 << 13) - 1),
                tf.float32,
            )
            for x in (a, b)
        ]
        return below(*short, **kwargs)

    return product


@pytest.mark.parametrize(("iterations", "most"), [(5, 1.5), (12, 1.01)])
def test_in_tensor_float_32(iterations: int, most: float) -> None:
    """Errors take directions that are zero, but none becomes too long."""
    given = [matrix(100, 32, rank=5), matrix(32, 32, rank=1), matrix(300, 32)]
    with mock.patch.object(tf, "matmul", in_low_precision(tf.matmul)):
        found = factors(*given, iterations=iterations)
    for one in found:
        assert 0.8 < np.linalg.norm(one, 2) < most


# --------------------------------------------------------------------- blocks
@pytest.mark.parametrize(
    ("columns", "block", "width"),
    [
        (10, None, 10),
        (32, 32, 32),
        (256, 32, 32),
        (48, 32, 24),
        (10, 32, 10),
        (12, 5, 4),
        (37, 32, 19),  # a prime: the last block lacks one
        (101, 10, 10),
        (5, 1, 1),
    ],
)
def test_blocks_of_columns(columns: int, block: int | None, width: int) -> None:
    assert block_width(columns, block) == width
    given = [matrix(45, columns), matrix(2, 30, columns)]
    found = factors(*given, block=block, iterations=12, dtype="float64")
    for got, whole in zip(found, given, strict=True):
        for start in range(0, columns, width):
            part = np.s_[..., start : start + width]
            want = by_svd(whole[part])
            np.testing.assert_allclose(got[part], want, atol=1e-6)


# ------------------------------------------------------------- special numbers
@pytest.mark.parametrize("iterations", [1, 5])
def test_vectors_are_divided_by_their_norm(iterations: int) -> None:
    given = [matrix(1, 9), matrix(9, 1), matrix(3, 4, 1), 1e-15 * matrix(1, 5)]
    found = factors(*given, iterations=iterations)
    for got, vector in zip(found, given, strict=True):
        norm = np.linalg.norm(vector, axis=(-2, -1), keepdims=True)
        np.testing.assert_allclose(got, vector / norm, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_neither_small_nor_large_numbers_matter(scale: float) -> None:
    given = matrix(6, 4)
    found = factors(scale * given, given, iterations=5)
    np.testing.assert_allclose(*found, atol=1e-5)


def test_zeros_stay() -> None:
    """In a stack too, beside others."""
    given = matrix(2, 6, 4)
    given[0] = 0
    (got,) = factors(given)
    assert not got[0].any()
    np.testing.assert_allclose(got[1], by_svd(given[1]), atol=1e-5)
    zeros = np.zeros((3, 1)), np.zeros((4, 4)), np.zeros((1, 3))
    assert not any(one.any() for one in factors(*zeros))
