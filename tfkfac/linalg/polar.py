"""Polar factors: the nearest matrices with orthonormal rows or columns."""

import math
from collections.abc import Sequence

import tensorflow as tf

# Polynomials `a x + b x^3 + c x^5` of the singular values, one after the
# other, each the best after those before (Amsel et al., 2025, "The Polar
# Express", for values of at least a thousandth); the last one stays.
_POLYNOMIALS = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
    (1.875, -1.25, 0.375),
)
# The polynomials need values below 1, after rounding too.
_ROOM = 1.01
# Polynomials that are applied to a Gram matrix before it is computed anew: its
# rounding errors, with eigenvalues below 0, grow ten-thousandfold in three of
# them. TensorFloat-32, that GPUs have for products, allows no more.
_AT_ONCE = 3
# A block of columns that is narrower than this share of the widest is not
# worth it: too few directions of a matrix are told apart.
_NARROW = 1 / 4


def polar_factors(
    matrices: Sequence[tf.Tensor], block: int | None, iterations: int
) -> list[tf.Tensor]:
    """Polar factors of the blocks of columns of some matrices.

    `U V^T` for a block `U S V^T`, its small singular values excepted, which do
    not come up to 1 in a few iterations. That of a vector is exact. What is
    zero stays so; squares must be neither too small nor too large for a number.
    Blocks of equal shapes are one batched product.

    Args:
        matrices: Float tensors `(..., rows, columns)` of known shapes.
        block: Most columns of a block; None is no limit.
        iterations: Number of polynomials that are applied.

    Returns:
        Tensors of the same shapes.
    """
    parts = [_columns(matrix, block) for matrix in matrices]
    kinds: dict[tuple[int, int, tf.DType], list[int]] = {}
    for i, part in enumerate(parts):
        kinds.setdefault((*part.shape[1:], part.dtype), []).append(i)
    found: dict[int, tf.Tensor] = {}
    for members in kinds.values():
        sizes = [parts[i].shape[0] for i in members]
        made = _polar(tf.concat([parts[i] for i in members], 0), iterations)
        found.update(zip(members, tf.split(made, sizes), strict=True))
    return [_whole(found[i], one.shape) for i, one in enumerate(matrices)]


def block_width(columns: int, block: int | None) -> int:
    """Columns of each block of a matrix.

    The largest number that divides its columns; if that is very few, blocks
    are about equal, and the last one lacks some.
    """
    if block is None or columns <= block:
        return columns
    width = next(k for k in range(block, 0, -1) if columns % k == 0)
    if width < _NARROW * block:
        width = math.ceil(columns / math.ceil(columns / block))
    return width


def _columns(matrix: tf.Tensor, block: int | None) -> tf.Tensor:
    """The blocks of `(..., rows, columns)` as `(blocks, rows, width)`."""
    rows, columns = matrix.shape[-2:]
    width = block_width(columns, block)
    lacking = -columns % width
    flat = tf.reshape(
        matrix, [matrix.shape.num_elements() // (rows * columns), rows, columns]
    )
    if lacking:
        flat = tf.pad(flat, [[0, 0], [0, 0], [0, lacking]])
    count = (columns + lacking) // width
    if count == 1:
        return flat
    apart = tf.reshape(flat, [flat.shape[0], rows, count, width])
    apart = tf.transpose(apart, [0, 2, 1, 3])
    return tf.reshape(apart, [flat.shape[0] * count, rows, width])


def _whole(blocks: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Inverse of `_columns`."""
    *_, rows, columns = shape
    width = blocks.shape[-1]
    count = math.ceil(columns / width)
    if count > 1:
        apart = tf.reshape(blocks, [-1, count, rows, width])
        blocks = tf.transpose(apart, [0, 2, 1, 3])
    if count * width > columns:
        blocks = tf.reshape(blocks, [-1, rows, count * width])[..., :columns]
    return tf.reshape(blocks, shape)


def _polar(x: tf.Tensor, iterations: int) -> tf.Tensor:
    """Polar factors of `(blocks, rows, columns)`."""
    rows, columns = x.shape[-2:]
    wide = rows < columns
    # A polynomial of `x` is `x` times one of its Gram matrix, on the narrow
    # side: `x` itself is in two products for some iterations.
    gram = tf.matmul(x, x, transpose_a=not wide, transpose_b=wide)
    square = tf.linalg.trace(gram)[:, None, None]
    if 1 in (rows, columns):
        return tf.math.divide_no_nan(x, tf.sqrt(square))
    gram = tf.math.divide_no_nan(gram, _ROOM**2 * square)
    one = tf.eye(min(rows, columns), dtype=x.dtype)
    product = tf.math.divide_no_nan(one, _ROOM * tf.sqrt(square))
    for i in range(iterations):
        if i > 0 and i % _AT_ONCE == 0:
            x = tf.matmul(product, x) if wide else tf.matmul(x, product)
            gram = tf.matmul(x, x, transpose_a=not wide, transpose_b=wide)
            product = one
        a, b, c = _POLYNOMIALS[min(i, len(_POLYNOMIALS) - 1)]
        factor = a * one + b * gram + c * tf.matmul(gram, gram)
        gram = tf.matmul(tf.matmul(factor, gram), factor)
        product = tf.matmul(product, factor)
    return tf.matmul(product, x) if wide else tf.matmul(x, product)
