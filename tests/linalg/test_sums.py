"""Sums over long vectors, against float64."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.reference import Array
from tfkfac.curvature import lanczos
from tfkfac.linalg.lanczos import random_vector
from tfkfac.linalg.sums import CHUNK, padded_size, row_products


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "size", [1, 7, CHUNK, CHUNK + 1, 20 * CHUNK, 1_000_003]
)
def test_products(rows: int, size: int) -> None:
    """Of which the first, of a vector with itself, is the hardest."""
    rng = np.random.default_rng(size)
    matrix = rng.normal(size=(rows, size)).astype("float32")
    got = tf.function(row_products)(tf.constant(matrix), matrix[0])
    exact = matrix.astype("float64")
    scale = np.linalg.norm(exact[0]) * np.linalg.norm(exact, axis=1)
    assert got.dtype == tf.float32
    np.testing.assert_array_less(abs(got - exact @ exact[0]), 3e-7 * scale)


@pytest.mark.parametrize(
    ("size", "want"),
    [(1, 1), (16_384, 16_384), (16_385, 18_432), (409_600, 409_600)],
)
def test_padded_size(size: int, want: int) -> None:
    assert padded_size(size) == want


def ritz_values(diagonal: Array, start: Array, steps: int) -> Array:
    """All of them, by NumPy in float64."""
    basis = [start / np.linalg.norm(start)]
    for _ in range(steps - 1):
        rest = diagonal * basis[-1]
        for _ in range(2):
            rest -= np.stack(basis, 1) @ (np.stack(basis) @ rest)
        basis.append(rest / np.linalg.norm(rest))
    rows = np.stack(basis)
    return np.asarray(np.linalg.eigvalsh((rows * diagonal) @ rows.T))


@pytest.mark.slow
@pytest.mark.parametrize("graph", [True, False])
def test_lanczos_of_a_long_diagonal(graph: bool) -> None:
    size, steps = 10_000_000, 4
    diagonal = np.linspace(-1, 3, size).astype("float32")

    def run() -> tf.Tensor:
        return lanczos(lambda v: diagonal * v, size, steps, num_largest=steps)[
            0
        ]

    values = tf.function(run)() if graph else run()
    start = np.asarray(random_vector(size, 0, 0), "float64")
    want = ritz_values(diagonal.astype("float64"), start, steps)
    np.testing.assert_allclose(values, want, rtol=0, atol=1e-6 * want[-1])
