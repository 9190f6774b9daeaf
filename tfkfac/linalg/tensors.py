"""Checks of tensors, and one of two tensors by a flag."""

from collections.abc import Sequence

import tensorflow as tf


def all_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns a scalar bool: no NaN and no infinity in any tensor."""
    return tf.reduce_all(are_finite(tensors))


def are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a bool for each tensor: no NaN and no infinity in it.

    A sum carries every NaN and infinity of its terms, and one reduction is
    several times cheaper than an element-wise test. Values so large that
    their sum overflows float32 count as not finite.
    """
    wide = [tf.cast(t, tf.float32) if t.dtype.size < 4 else t for t in tensors]
    # With axes of its own each sum would be two operations.
    ranks = {tensor.shape.rank for tensor in wide} - {None}
    axes = {n: tf.constant(list(range(n)), tf.int32) for n in ranks}
    sums = [tf.reduce_sum(t, axes.get(t.shape.rank)) for t in wide]
    widest = max((x.dtype for x in sums), key=lambda dtype: dtype.size)
    return tf.math.is_finite(tf.stack([tf.cast(x, widest) for x in sums]))


def select(flag: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns `one` if a flag is true, else `other`; neither is computed with.

    So does `tf.where`, but on a CPU it stretches the flag, a scalar, over all
    elements and looks at each, which takes ten times as long as to copy them.
    """
    return tf.raw_ops.Select(condition=flag, x=one, y=other)


def stack_scalars(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Scalars of any float dtypes, at least one, as a vector in float64."""
    widest = max((x.dtype for x in numbers), key=lambda dtype: dtype.size)
    vector = tf.stack([tf.cast(x, widest) for x in numbers])
    return tf.cast(vector, tf.float64)


def rounding(dtype: tf.DType) -> float:
    """Returns the machine epsilon of a floating point dtype."""
    return 2.0**-52 if dtype == tf.float64 else 2.0**-23
