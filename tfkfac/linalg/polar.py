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
        size = min(x.shape[-2:])
        if size > 1:
            # Pad the Gram matrices: a few sizes serve all layers. Powers of 2
            # bound the cost at small widths.
            least = _MIN_SIZE_XLA if in_xla() else _MIN_SIZE
            size = max(least, 1 << (size - 1).bit_length())
        by_size.setdefault((size, x.dtype), []).append(i)
    results: dict[int, tf.Tensor] = {}
    for (size, _), indices in by_size.items():
        stacks = [blocks[i] for i in indices]
        if size == 1:
            factors = [_normalized(x) for x in stacks]
        else:
            factors = _polar(stacks, size, iterations)
        results.update(zip(indices, factors, strict=True))
    wholes = []
    for i, matrix in enumerate(matrices):
        # Invert `_columns`: join the blocks, without the padding of the last.
        factor, (rows, columns) = results[i], matrix.shape[-2:]
        width = factor.shape[-1]
        count = math.ceil(columns / width)
        if count > 1:
            split = tf.reshape(factor, [-1, count, rows, width])
            factor = tf.transpose(split, [0, 2, 1, 3])
        if count * width > columns:
            padded = tf.reshape(factor, [-1, rows, count * width])
            factor = padded[..., :columns]
        wholes.append(tf.reshape(factor, matrix.shape))
    return wholes


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


def _normalized(vectors: tf.Tensor) -> tf.Tensor:
    """Divide each vector, a matrix of one row or column, by its norm."""
    square = tf.reduce_sum(tf.square(vectors), [-2, -1], keepdims=True)
    return tf.math.divide_no_nan(vectors, tf.sqrt(square))


def _polar(
    stacks: list[tf.Tensor], size: int, iterations: int
) -> list[tf.Tensor]:
    """Compute the polar factors of stacks `(blocks, rows, columns)`.

    An odd polynomial of the singular values is x times a polynomial of the
    smaller Gram matrix, so only two products per Gram matrix contain x.
    """
    counts = [x.shape[0] for x in stacks]
    per_gram = _POLYNOMIALS_PER_GRAM
    is_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    if is_tf32 and tf.config.list_logical_devices("GPU"):
        per_gram = _POLYNOMIALS_PER_GRAM_TF32
    for start in range(0, iterations, per_gram):
        # Compute the polynomials of all stacks together.
        grams = [_gram(x, size) for x in stacks]
        gram = tf.concat(grams, 0) if len(grams) > 1 else grams[0]
        square = tf.ones([], gram.dtype)
        if start == 0:
            square = _MARGIN**2 * tf.linalg.trace(gram)[:, None, None]
            gram = tf.math.divide_no_nan(gram, square)
        # The product q of polynomials, so that `x q(x^T x)` applies them to x.
        identity = tf.eye(size, dtype=gram.dtype)
        product = factor = identity
        for i in range(start, min(start + per_gram, iterations)):
            if i > start:
                gram = tf.matmul(tf.matmul(factor, gram), factor)
            a, b, c = _POLYNOMIALS[min(i, len(_POLYNOMIALS) - 1)]
            factor = a * identity + b * gram + c * tf.matmul(gram, gram)
            product = tf.matmul(product, factor) if i > start else factor
        product = tf.math.divide_no_nan(product, tf.sqrt(square))
        factors = tf.split(product, counts)
        for k, (x, factor) in enumerate(zip(stacks, factors, strict=True)):
            rows, columns = x.shape[-2:]
            factor = factor[:, : min(rows, columns), : min(rows, columns)]
            pair = (factor, x) if rows < columns else (x, factor)
            stacks[k] = tf.matmul(*pair)
    return stacks


def _gram(x: tf.Tensor, size: int) -> tf.Tensor:
    """Return the smaller Gram matrix, padded with zeros."""
    rows, columns = x.shape[-2:]
    wide = rows < columns
    gram = tf.matmul(x, x, transpose_a=not wide, transpose_b=wide)
    missing = size - min(rows, columns)
    return tf.pad(gram, [[0, 0], [0, missing], [0, missing]])
