"""Symmetric matrices: decompositions, inverses, products `R^T R`, triangles."""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfkfac.linalg.tensors import all_finite, rounding

# From so many rows on, products are faster than solving for the identity.
LARGE = 384
# How often a large matrix is halved: a sixteenth of it is left to solve.
_LEVELS = 2
# Bands of a product: more of them gain little, and make narrow products.
_BANDS = 4


def symmetrize(matrix: tf.Tensor) -> tf.Tensor:
    """Returns `(M + M^T) / 2` for `matrix` of shape `(..., n, n)`."""
    return (matrix + tf.linalg.matrix_transpose(matrix)) / 2


def eigh(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Eigen-decomposition with eigenvalues clamped at zero.

    TensorFlow's CPU kernel raises on a matrix that is not finite, which would
    end training; such a matrix yields NaN here, for the caller to reject.
    Eigenvalues of symmetric matrices `(..., n, n)` are `(..., n)`, ascending,
    eigenvectors are columns.
    """
    finite = all_finite([matrix])
    identity = tf.eye(tf.shape(matrix)[-1], dtype=matrix.dtype)
    values, vectors = tf.linalg.eigh(
        tf.where(finite, symmetrize(matrix), identity)
    )
    nan = tf.constant(float("nan"), matrix.dtype)
    return tf.where(finite, tf.maximum(values, 0), nan), vectors


def mean_eigenvalue(matrix: tf.Tensor) -> tf.Tensor:
    """Trace over dimension, `(...,)`, of matrices `(..., n, n)`."""
    return tf.reduce_mean(tf.linalg.diag_part(matrix), -1)


def damped_inverse(
    matrix: tf.Tensor, damping: tf.Tensor, large: bool | None = None
) -> tf.Tensor:
    """Computes `(M + damping I)^-1` by Cholesky.

    The damping is kept above the rounding error of the factorisation, four
    times machine epsilon times the trace, so that a singular matrix still has
    an inverse.
    What cannot be factorised comes out as NaN, for the caller to reject.
    Symmetric matrices are `(..., n, n)`, the damping `(...,)` or one for all;
    if they are `large` (n is at least `LARGE`), None leaves to static shapes.
    """
    diagonal = tf.linalg.diag_part(matrix)
    floor = 4 * rounding(matrix.dtype) * tf.reduce_sum(diagonal, -1)
    # A matrix of zeros without damping is inverted as the identity.
    shift = tf.maximum(damping, floor)
    shift = tf.where(shift > 0, shift, tf.ones_like(shift))
    damped = tf.linalg.set_diag(
        symmetrize(matrix), diagonal + tf.expand_dims(shift, -1)
    )
    root = tf.linalg.cholesky(damped)
    if large is None:
        large = matrix.shape[-1] >= LARGE
    if large:
        # To solve for the identity takes twice the operations that the result
        # needs, on one core. L is inverted by its quarters instead, and
        # L^-T L^-1 is made of them, most of it by products. Errors are those
        # of solving (Higham, 2002, section 14.2).
        return _gram(_inverse(root, _LEVELS), _LEVELS)
    return symmetrize(tf.linalg.cholesky_solve(root, _identity(root)))


def _inverse(lower: tf.Tensor, levels: int) -> tf.Tensor:
    """Invert a lower triangular matrix, halved `levels` times."""
    if levels == 0:
        return tf.linalg.triangular_solve(lower, _identity(lower))
    first, below, last = _quarters(lower)
    first, last = _inverse(first, levels - 1), _inverse(last, levels - 1)
    below = -tf.matmul(last, tf.matmul(below, first))
    above = tf.zeros_like(tf.linalg.matrix_transpose(below))
    return _join(first, above, below, last)


def _gram(lower: tf.Tensor, levels: int) -> tf.Tensor:
    """`J^T J` of a lower triangular matrix `J`, halved `levels` times."""
    if levels == 0:
        return symmetrize(tf.matmul(lower, lower, transpose_a=True))
    first, below, last = _quarters(lower)
    mixed = tf.matmul(below, last, transpose_a=True)
    return _join(
        _gram(first, levels - 1) + _gram(below, 0),
        mixed,
        tf.linalg.matrix_transpose(mixed),
        _gram(last, levels - 1),
    )


def _quarters(lower: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The quarters of a lower triangular matrix that are not zero."""
    half = tf.unstack(tf.shape(lower))[-1] // 2
    top, bottom = tf.split(lower, [half, -1], -2)
    below, last = tf.split(bottom, [half, -1], -1)
    return tf.split(top, [half, -1], -1)[0], below, last


def _join(
    first: tf.Tensor, above: tf.Tensor, below: tf.Tensor, last: tf.Tensor
) -> tf.Tensor:
    """Join the quarters of a matrix."""
    rows = tf.concat([first, above], -1), tf.concat([below, last], -1)
    return tf.concat(rows, -2)


def _identity(like: tf.Tensor) -> tf.Tensor:
    ones = tf.ones_like(tf.linalg.diag_part(like))
    return tf.linalg.set_diag(tf.zeros_like(like), ones)


def bands(rows: tf.Tensor) -> list[tf.Tensor]:
    """Bands of the upper half of `rows^T rows`, for `from_bands`.

    A band has some rows of the product, from the diagonal on. That saves three
    eighths of the operations, a third of the time for a thousand columns or
    more. Sums of such products are those of their bands. The number of columns
    is static.
    """
    edges = _edges(rows.shape[1])
    return [
        tf.matmul(rows[:, first:end], rows[:, first:], transpose_a=True)
        for first, end in itertools.pairwise(edges)
    ]


def band_shapes(size: int) -> list[tuple[int, int]]:
    """Shapes of the bands of a matrix of a size."""
    return [
        (end - first, size - first)
        for first, end in itertools.pairwise(_edges(size))
    ]


def from_bands(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The whole symmetric matrix of its bands."""
    size = parts[0].shape[1]
    whole = tf.concat(
        [tf.pad(part, [[0, 0], [size - part.shape[1], 0]]) for part in parts],
        0,
    )
    upper = tf.linalg.band_part(whole, 0, -1)
    strict = tf.linalg.set_diag(upper, tf.zeros([size], upper.dtype))
    return upper + tf.linalg.matrix_transpose(strict)


def _edges(size: int) -> list[int]:
    return [size * i // _BANDS for i in range(_BANDS + 1)]


def packed_size(shape: tuple[int, ...]) -> int:
    """Number of entries of packed matrices of shape `(..., n, n)`."""
    size = shape[-1]
    return math.prod(shape[:-2]) * size * (size + 1) // 2


def pack(matrix: tf.Tensor) -> tf.Tensor:
    """Upper triangles of `(..., n, n)` as one vector (KAISA, section 4.3)."""
    size = matrix.shape[-1]
    flat = tf.reshape(matrix, [-1, size * size])
    return tf.reshape(tf.gather(flat, _upper(size), axis=1), [-1])


def unpack(vector: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Inverse of `pack` for symmetric matrices of shape `(..., n, n)`."""
    size = shape[-1]
    flat = tf.reshape(vector, [-1, size * (size + 1) // 2])
    return tf.reshape(tf.gather(flat, _places(size), axis=1), shape)


@functools.lru_cache(maxsize=256)
def _upper(size: int) -> np.ndarray:
    """Positions of the upper triangle in a flattened matrix."""
    rows, columns = np.triu_indices(size)
    return (rows * size + columns).astype(np.int32)


@functools.lru_cache(maxsize=256)
def _places(size: int) -> np.ndarray:
    """For each entry of a flattened matrix, its position in the triangle."""
    places = np.zeros((size, size), np.int32)
    places[np.triu_indices(size)] = np.arange(size * (size + 1) // 2)
    upper = np.triu(places)
    return (upper + np.triu(places, 1).T).reshape(-1)
