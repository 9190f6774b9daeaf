"""Polar factors: nearest matrices with orthonormal rows or columns."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.compat.graphs import in_xla

# Coefficients of `a x + b x^3 + c x^5`, applied to the singular values in this
# order. Each is optimal after its predecessors, for singular values of at least
# 0.001 (Amsel et al., 2025, "The Polar Express"). The last is repeated.
_POLYNOMIALS = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
    (1.875, -1.25, 0.375),
)
# Margin of the norm, so that rounded singular values stay below 1.
_MARGIN = 1.01
# Polynomials per computation of the Gram matrix. Rounding errors make some of
# its eigenvalues negative. Three polynomials multiply these by 20,000, five by
# 1,000,000: too much for the products in TensorFloat-32 of GPUs.
_POLYNOMIALS_PER_GRAM = 5
_POLYNOMIALS_PER_GRAM_TF32 = 3
# Minimum width of a block, relative to the maximum. In narrower blocks, too few
# columns are orthogonalised together.
_MIN_WIDTH = 1 / 4
# Minimum size of padded Gram matrices. XLA compiles and tunes the products of
# each size, so sizes up to 32 are padded to 32 there.
_MIN_SIZE, _MIN_SIZE_XLA = 8, 32


def polar_factors(
    matrices: Sequence[tf.Tensor], block: int | None, iterations: int
) -> list[tf.Tensor]:
    """Approximate the polar factor `U V^T` of each block of columns `U S V^T`.

    The matrices are `(..., rows, columns)` with static shapes and squared norms
    that the dtype can represent. For a vector the result is exact. Zero blocks
    stay zero. A block has at most `block` columns; None is no limit.
    """
    blocks = [_columns(matrix, block) for matrix in matrices]
    by_size: dict[tuple[int, tf.DType], list[int]] = {}
    for i, x in enumerate(blocks):
        by_size.setdefault((_gram_size(x), x.dtype), []).append(i)
    results: dict[int, tf.Tensor] = {}
    for (size, _), indices in by_size.items():
        stacks = [blocks[i] for i in indices]
        factors = (
            [_normalized(x) for x in stacks]
            if size == 1
            else _polar(stacks, size, iterations)
        )
        results.update(zip(indices, factors, strict=True))
    return [_whole(results[i], x.shape) for i, x in enumerate(matrices)]


def _columns(matrix: tf.Tensor, block: int | None) -> tf.Tensor:
    """Reshape `(..., rows, columns)` to blocks `(blocks, rows, width)`."""
    rows, columns = matrix.shape[-2:]
    width = columns
    if block is not None and columns > block:
        width = next(k for k in range(block, 0, -1) if columns % k == 0)
        if width < _MIN_WIDTH * block:  # pad the last block
            width = math.ceil(columns / math.ceil(columns / block))
    padding = -columns % width
    flat = tf.reshape(
        matrix, [matrix.shape.num_elements() // (rows * columns), rows, columns]
    )
    if padding:
        flat = tf.pad(flat, [[0, 0], [0, 0], [0, padding]])
    count = (columns + padding) // width
    if count == 1:
        return flat
    split = tf.reshape(flat, [flat.shape[0], rows, count, width])
    split = tf.transpose(split, [0, 2, 1, 3])
    return tf.reshape(split, [flat.shape[0] * count, rows, width])


def _whole(blocks: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Invert `_columns`: join blocks to a matrix of the given shape."""
    *_, rows, columns = shape
    width = blocks.shape[-1]
    count = math.ceil(columns / width)
    if count > 1:
        split = tf.reshape(blocks, [-1, count, rows, width])
        blocks = tf.transpose(split, [0, 2, 1, 3])
    if count * width > columns:
        blocks = tf.reshape(blocks, [-1, rows, count * width])[..., :columns]
    return tf.reshape(blocks, shape)


def _gram_size(x: tf.Tensor) -> int:
    """Return the size to which Gram matrices are padded; 1 for vectors.

    A few sizes serve all layers; powers of 2 bound the cost at small widths.
    """
    size = min(x.shape[-2:])
    if size == 1:
        return 1
    least = _MIN_SIZE_XLA if in_xla() else _MIN_SIZE
    return max(least, 1 << (size - 1).bit_length())


def _normalized(vectors: tf.Tensor) -> tf.Tensor:
    """Divide each vector, a matrix of one row or column, by its norm."""
    square = tf.reduce_sum(tf.square(vectors), [-2, -1], keepdims=True)
    return tf.math.divide_no_nan(vectors, tf.sqrt(square))


def _polar(
    stacks: Sequence[tf.Tensor], size: int, iterations: int
) -> list[tf.Tensor]:
    """Compute the polar factors of stacks `(blocks, rows, columns)`.

    An odd polynomial of the singular values is x times a polynomial of the
    smaller Gram matrix. So only two products per Gram matrix contain x. The
    polynomials of all stacks are computed together, of Gram matrices that are
    padded to `size`.
    """
    counts = [x.shape[0] for x in stacks]
    per_gram = _POLYNOMIALS_PER_GRAM
    is_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    if is_tf32 and tf.config.list_logical_devices("GPU"):
        per_gram = _POLYNOMIALS_PER_GRAM_TF32
    for start in range(0, iterations, per_gram):
        grams = [_gram(x, size) for x in stacks]
        gram = tf.concat(grams, 0) if len(grams) > 1 else grams[0]
        square = tf.ones([], gram.dtype)
        if start == 0:
            square = _MARGIN**2 * tf.linalg.trace(gram)[:, None, None]
            gram = tf.math.divide_no_nan(gram, square)
        last = min(start + per_gram, iterations)
        product = tf.math.divide_no_nan(
            _product_of_polynomials(gram, range(start, last)), tf.sqrt(square)
        )
        stacks = [
            _multiplied(x, factor)
            for x, factor in zip(stacks, tf.split(product, counts), strict=True)
        ]
    return list(stacks)


def _product_of_polynomials(gram: tf.Tensor, steps: range) -> tf.Tensor:
    """Return `q(x^T x)`, where `x q(x^T x)` applies some polynomials to x."""
    identity = tf.eye(gram.shape[-1], dtype=gram.dtype)
    product = factor = identity
    for i in steps:
        if i > steps.start:
            gram = tf.matmul(tf.matmul(factor, gram), factor)
        a, b, c = _POLYNOMIALS[min(i, len(_POLYNOMIALS) - 1)]
        factor = a * identity + b * gram + c * tf.matmul(gram, gram)
        product = tf.matmul(product, factor) if i > steps.start else factor
    return product


def _gram(x: tf.Tensor, size: int) -> tf.Tensor:
    """Return the smaller Gram matrix, padded with zeros."""
    rows, columns = x.shape[-2:]
    wide = rows < columns
    gram = tf.matmul(x, x, transpose_a=not wide, transpose_b=wide)
    missing = size - min(rows, columns)
    return tf.pad(gram, [[0, 0], [0, missing], [0, missing]])


def _multiplied(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiply matrices by a padded function of their smaller Gram matrix."""
    rows, columns = x.shape[-2:]
    factor = factor[:, : min(rows, columns), : min(rows, columns)]
    return tf.matmul(factor, x) if rows < columns else tf.matmul(x, factor)
