"""A symmetric matrix from its product with a few fixed columns.

Of a wide matrix `M` only the product `Y = M Omega` is known. It says most of
the leading part of the spectrum: Nystroem's approximation `Y (Omega^T Y)^-1
Y^T` (Halko, Martinsson & Tropp, 2011, section 5.4; Tropp et al., 2017).
"""

import functools
import math

import numpy as np
import tensorflow as tf

from tfkfac.linalg.symmetric import symmetrize
from tfkfac.linalg.tensors import rounding


def probes(size: int, rank: int, dtype: tf.DType) -> tf.Tensor:
    """Orthonormal columns that are alike to every matrix: `Omega`.

    Random rows of the cosine transform of a vector with random signs (Halko,
    Martinsson & Tropp, 2011, section 4.6). They are the same on every worker
    and in every run. A graph holds the few random numbers; the matrix is
    computed.

    Args:
        size: Number of rows.
        rank: Number of columns, less than `size`.
        dtype: Dtype of the result.

    Returns:
        A matrix `(size, rank)`.
    """
    signs, frequencies = _random_transform(size, rank)
    # As whole numbers: a float32 knows no angle of a million turns.
    odd = tf.expand_dims(tf.range(1, 2 * size, 2, tf.int64), 1)
    steps = odd * frequencies
    angles = tf.cast(steps % (4 * size), dtype) * (math.pi / (2 * size))
    scale = tf.cast(signs[:, None], dtype) * math.sqrt(2 / size)
    return scale * tf.cos(angles)


@functools.lru_cache(maxsize=256)
def _random_transform(size: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A sign for each row, and a frequency for each column of `probes`."""
    # The legacy generator: its numbers are the same in all NumPy versions.
    rng = np.random.RandomState(0)
    signs = 2 * rng.randint(2, size=size) - 1
    frequencies = 1 + rng.permutation(size - 1)[:rank]
    return signs.astype(np.int8), frequencies.astype(np.int64)


def nystroem_half(
    product: tf.Tensor, columns: tf.Tensor, precision: tf.DType
) -> tf.Tensor:
    """A matrix `F` with `F F^T` near the positive semi-definite `M`.

    If the rank of `M` is no larger than the number of columns, `F F^T` is `M`
    to rounding; in any case it is not above `M`.

    Args:
        product: `M Omega`, `(..., n, r)`.
        columns: `Omega`, `(n, r)`.
        precision: Dtype in which the product was made.

    Returns:
        `F`, of the shape of `product`; not finite if that is not, or far from
        the product with a positive semi-definite matrix.
    """
    core = tf.matmul(columns, product, transpose_a=True)
    # Directions below the noise are left out: that of rounding, and that of
    # what the product has gone through, which shows as asymmetry.
    skew = core - tf.linalg.matrix_transpose(core)
    noise = tf.norm(skew, axis=[-2, -1])
    noise += 4 * rounding(precision) * tf.linalg.trace(core)
    # A matrix of zeros has the half zero.
    noise = tf.where(tf.equal(noise, 0), tf.ones_like(noise), noise)
    identity = tf.eye(columns.shape[-1], dtype=core.dtype)
    root = tf.linalg.cholesky(
        symmetrize(core) + noise[..., None, None] * identity
    )
    transposed = tf.linalg.matrix_transpose(product)
    half = tf.linalg.triangular_solve(root, transposed)
    return tf.linalg.matrix_transpose(half)
