"""Symmetric matrices: eigenvalues, inverses, products `R^T R`, packing."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfkfac.linalg.tensors import nan_unless, rounding

LARGE = 384  # Rows from which on block inversion is faster than solving.
# Recursion depth of the block inversion: 2 levels leave 4 diagonal blocks.
_LEVELS = 2
# Number of bands of a product `R^T R`; more bands save little time.
_BANDS = 4


def symmetrize(matrix: tf.Tensor) -> tf.Tensor:
    """Return `(M + M^T) / 2` for `matrix` of shape `(..., n, n)`."""
    return (matrix + tf.linalg.matrix_transpose(matrix)) / 2


def eigh(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Eigendecomposition of symmetric matrices, eigenvalues clamped at zero.

    Returns ascending eigenvalues `(..., n)`, and eigenvectors as columns.
    TensorFlow's CPU kernel raises for non-finite matrices, which would end
    training. Here they result in NaN, which the caller has to reject.
    """
    finite = tf.math.is_finite(tf.reduce_sum(matrix, [-2, -1], keepdims=True))
    identity = tf.eye(tf.shape(matrix)[-1], dtype=matrix.dtype)
    values, vectors = tf.linalg.eigh(
        tf.where(finite, symmetrize(matrix), identity)
    )
    values = nan_unless(tf.squeeze(finite, -1), tf.maximum(values, 0))
    return values, vectors


def damped_inverse(
    matrix: tf.Tensor, damping: tf.Tensor, large: bool | None = None
) -> tf.Tensor:
    """Compute `(M + damping I)^-1` by Cholesky.

    The damping is at least the rounding error of the factorisation, `4 eps
    trace(M)`, so that a singular matrix has an inverse. If the factorisation
    fails, the result is NaN, which the caller has to reject. `large` selects
    block inversion; None for `n >= LARGE`.
    """
    root = _damped_cholesky(matrix, damping)
    if large is None:
        large = matrix.shape[-1] >= LARGE
    if large:
        # Compute L^-1 and L^-T L^-1 blockwise, mostly by matrix products.
        # Solving for the identity has similar errors (Higham, 2002, section
        # 14.2), but takes twice the operations and uses a single core.
        return _gram(_inverse(root, _LEVELS), _LEVELS)
    return symmetrize(tf.linalg.cholesky_solve(root, _identity(root)))


def damped_inverse_root(
    matrix: tf.Tensor, damping: tf.Tensor, large: bool | None = None
) -> tf.Tensor:
    """Compute the upper triangular R with `R R^T = (M + damping I)^-1`.

    `R = L^-T` for the Cholesky factor L of the damped matrix. Arguments,
    minimum damping and failures as in `damped_inverse`.
    """
    root = _damped_cholesky(matrix, damping)
    if large is None:
        large = matrix.shape[-1] >= LARGE
    return tf.linalg.matrix_transpose(_inverse(root, _LEVELS if large else 0))


def _damped_cholesky(matrix: tf.Tensor, damping: tf.Tensor) -> tf.Tensor:
    """Compute the Cholesky factor of M with at least the minimum damping."""
    diagonal = tf.linalg.diag_part(matrix)
    floor = 4 * rounding(matrix.dtype) * tf.reduce_sum(diagonal, -1)
    # Use damping 1 for a zero matrix without damping.
    shift = tf.maximum(damping, floor)
    shift = tf.where(shift > 0, shift, tf.ones_like(shift))
    damped = tf.linalg.set_diag(
        symmetrize(matrix), diagonal + tf.expand_dims(shift, -1)
    )
    return tf.linalg.cholesky(damped)


def _inverse(lower: tf.Tensor, levels: int) -> tf.Tensor:
    """Invert a lower triangular matrix blockwise, with `levels` recursions."""
    if levels == 0:
        return tf.linalg.triangular_solve(lower, _identity(lower))
    first, below, last = _lower_blocks(lower)
    first, last = _inverse(first, levels - 1), _inverse(last, levels - 1)
    below = -tf.matmul(last, tf.matmul(below, first))
    above = tf.zeros_like(tf.linalg.matrix_transpose(below))
    return _join_blocks(first, above, below, last)


def _gram(lower: tf.Tensor, levels: int) -> tf.Tensor:
    """Compute `J^T J` of a lower triangular J, with `levels` recursions."""
    if levels == 0:
        return symmetrize(tf.matmul(lower, lower, transpose_a=True))
    first, below, last = _lower_blocks(lower)
    mixed = tf.matmul(below, last, transpose_a=True)
    return _join_blocks(
        _gram(first, levels - 1) + _gram(below, 0),
        mixed,
        tf.linalg.matrix_transpose(mixed),
        _gram(last, levels - 1),
    )


def _lower_blocks(lower: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Split a lower triangle: top left, bottom left, bottom right block."""
    half_size = tf.unstack(tf.shape(lower))[-1] // 2
    top, bottom = tf.split(lower, [half_size, -1], -2)
    below, last = tf.split(bottom, [half_size, -1], -1)
    return tf.split(top, [half_size, -1], -1)[0], below, last


def _join_blocks(
    first: tf.Tensor, above: tf.Tensor, below: tf.Tensor, last: tf.Tensor
) -> tf.Tensor:
    """Join four blocks into a matrix: first | above over below | last."""
    rows = tf.concat([first, above], -1), tf.concat([below, last], -1)
    return tf.concat(rows, -2)


def _identity(like: tf.Tensor) -> tf.Tensor:
    ones = tf.ones_like(tf.linalg.diag_part(like))
    return tf.linalg.set_diag(tf.zeros_like(like), ones)


def bands(rows: tf.Tensor) -> list[tf.Tensor]:
    """Compute the upper triangle of `rows^T rows` in bands, for `from_bands`.

    A band has some rows of the product, from the diagonal block on. This saves
    1/3 of the time from 1,000 columns on.
    """
    return [
        tf.matmul(rows[:, first:end], rows[:, first:], transpose_a=True)
        for first, end in _ranges(rows.shape[1])
    ]


def band_shapes(size: int) -> list[tuple[int, int]]:
    """Shapes of the bands of a matrix with `size` rows."""
    return [(end - first, size - first) for first, end in _ranges(size)]


def from_bands(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Build the full symmetric matrix from the results of `bands`."""
    size = parts[0].shape[1]
    padded = tf.concat(
        [tf.pad(band, [[0, 0], [size - band.shape[1], 0]]) for band in parts], 0
    )
    upper = tf.linalg.band_part(padded, 0, -1)
    strict = tf.linalg.set_diag(upper, tf.zeros([size], upper.dtype))
    return upper + tf.linalg.matrix_transpose(strict)


def _ranges(size: int) -> Iterable[tuple[int, int]]:
    """First row of each band, and first row of the next band."""
    return itertools.pairwise(size * i // _BANDS for i in range(_BANDS + 1))


def packed_size(shape: tuple[int, ...]) -> int:
    """Number of entries of packed matrices of shape `(..., n, n)`."""
    size = shape[-1]
    return math.prod(shape[:-2]) * size * (size + 1) // 2


def pack(matrix: tf.Tensor) -> tf.Tensor:
    """Pack upper triangles of `(..., n, n)` in a vector (KAISA, sec. 4.3)."""
    size = matrix.shape[-1]
    flat = tf.reshape(matrix, [-1, size * size])
    return tf.reshape(tf.gather(flat, _triangle(size)[0], axis=1), [-1])


def unpack(vector: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Unpack the result of `pack` to symmetric matrices `(..., n, n)`."""
    size = shape[-1]
    flat = tf.reshape(vector, [-1, size * (size + 1) // 2])
    return tf.reshape(tf.gather(flat, _triangle(size)[1], axis=1), shape)


@functools.lru_cache(maxsize=256)
def _triangle(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices between a flattened matrix and its packed upper triangle.

    Returns the index in the matrix of each packed element, and the index in the
    packed triangle of each element of the matrix.
    """
    rows, columns = np.triu_indices(size)
    packed = (rows * size + columns).astype(np.int32)
    places = np.zeros((size, size), np.int32)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return packed, places.reshape(-1)
