"""Polar factors against NumPy's singular values."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(deadline=None, max_examples=20, derandomize=True)
@given(data=st.data())
def test_by_singular_values(data: Any) -> None:
    """Of stacks and vectors, at any scale; zeros stay zero."""
    shapes = [
        (
            *data.draw(st.sampled_from([(), (2,), (2, 3)])),
            data.draw(st.integers(1, 40)),
            data.draw(st.integers(1, 40)),
        )
        for _ in range(2)
    ]
    scale = data.draw(st.sampled_from([1e-15, 1.0, 1e15]))
    dtype, iterations, tolerance = data.draw(
        st.sampled_from([("float32", 7, 1e-5), ("float64", 12, 1e-11)])
    )
    matrices = [scale * matrix(*shape) for shape in shapes]
    zeros = np.zeros(shapes[0])
    *results, zero = factors(
        *matrices, zeros, iterations=iterations, dtype=dtype
    )
    assert not zero.any()
    for result, x in zip(results, matrices, strict=True):
        np.testing.assert_allclose(result, by_svd(x), atol=tolerance)


@pytest.mark.parametrize(
    ("columns", "block", "width"),
    [
        (32, 32, 32),
        (48, 32, 24),
        (28, 10, 7),
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


def test_invalid_matrices_do_not_change_others() -> None:
    """Matrices of several shapes share padded Gram matrices, also under XLA."""
    shapes = [(2, 5), (9, 4), (3, 4, 4), (40, 33), (7, 1)]
    valid = [matrix(*shape) for shape in shapes]
    invalid = [np.full((4, 7), np.nan), np.full((33, 33), np.inf)]
    tensors = [tf.constant(x, "float64") for x in (*invalid, *valid)]
    for polar in polar_factors, tf.function(polar_factors, jit_compile=True):
        _, _, *results = polar(tensors, None, 12)
        for result, x in zip(results, valid, strict=True):
            np.testing.assert_allclose(result, by_svd(x), atol=1e-10)


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
