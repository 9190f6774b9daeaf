"""Finiteness checks, selection by flags, sums of rows, sizes, epsilon."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def all_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Return a scalar bool: True if no tensor has a NaN or infinity."""
    return tf.reduce_all(are_finite(tensors))


def are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a bool vector: True for each tensor with a finite sum."""
    # A sum propagates NaN and infinity, and is several times faster than an
    # element-wise test.
    wide = [tf.cast(t, tf.float32) if t.dtype.size < 4 else t for t in tensors]
    # Share constants for the axes: default axes add an operation per sum.
    ranks = {tensor.shape.rank for tensor in wide} - {None}
    axes = {n: tf.constant(list(range(n)), tf.int32) for n in ranks}
    sums = [tf.reduce_sum(t, axes.get(t.shape.rank)) for t in wide]
    widest = max((x.dtype for x in sums), key=lambda dtype: dtype.size)
    return tf.math.is_finite(tf.stack([tf.cast(x, widest) for x in sums]))


def row_sums(stack: tf.Tensor) -> tf.Tensor:
    """Sum over all axes except the first."""
    axes = list(range(1, stack.shape.rank))
    return tf.reduce_sum(stack, axes) if axes else stack


def row_squares(stack: tf.Tensor) -> tf.Tensor:
    """Return half the squared norm of each row of the first axis."""
    if stack.shape[0] == 1:  # `l2_loss` has no temporary tensor of squares
        return tf.nn.l2_loss(stack)[None]
    return row_sums(tf.square(stack)) / 2


def unstacked(stack: tf.Tensor) -> list[tf.Tensor]:
    """Invert `tf.stack`; the number of rows is static."""
    if stack.shape[0] == 1:  # `tf.unstack` would copy
        return [tf.squeeze(stack, [0])]
    return tf.unstack(stack)


def select(flag: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return x if a flag is true, else y; a scalar, or a flag per row."""
    # `tf.where` broadcasts the flag on a CPU and takes ten times as long.
    return tf.raw_ops.Select(condition=flag, x=x, y=y)


def nan_unless(valid: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor, or NaN where `valid` is False; `valid` broadcasts."""
    # Compute NaN as 0 / 0: `tf.debugging.enable_check_numerics` raises on each
    # constant that is NaN or infinite, even if the graph does not use it.
    flag = tf.cast(valid, tensor.dtype)
    return tf.where(valid, tensor, tf.zeros_like(tensor)) / flag


def rounding(dtype: tf.DType) -> float:
    """Return the machine epsilon of float64, or of float32 for other dtypes."""
    return 2.0**-52 if dtype == tf.float64 else 2.0**-23


def size_of(tensor: tf.Tensor, axis: int) -> Any:
    """Size of an axis; a Python integer if it is static."""
    size = tensor.shape[axis]
    # Use `tf.unstack`: indexing adds three constants to the graph.
    return tf.unstack(tf.shape(tensor))[axis] if size is None else size
