"""Records of the backward pass that is applied, where there were several.

Somebody may take two gradients of one forward pass: of two losses, of which
the sum is applied; of one loss for another model, as in a GAN; of a loss that
itself has a gradient in it. Each leaves a record for the same call of a layer.
The gradient that is applied decides: it is the product of the inputs with the
recorded gradients of the last pass of each call, of the first (as in the GAN
of TensorFlow's tutorial), or of all.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain

import tensorflow as tf

from tfkfac.blocks.base import Block
from tfkfac.capture.taps import Record

# The records of each call of a layer, in the order in which they came.
Calls = Sequence[Sequence[Record]]

# Squared relative distance of a gradient from what it should be.
_TOLERANCE = 1e-4


def records_of(
    block: Block, calls: Calls, gradients: Sequence[tf.Tensor]
) -> tuple[list[Record], tf.Tensor | None]:
    """Returns one record of each call, of the pass that is applied.

    Args:
        block: The block.
        calls: Records of the calls of its layer.
        gradients: The gradients of its weights on this replica. They may be
            off by a factor, as clipping makes them.

    Returns:
        The records, and whether they explain the gradients; None if there was
        no choice.
    """
    if all(len(records) == 1 for records in calls):
        return [records[0] for records in calls], None
    lengths = [len(records) for records in calls]
    last = [float(i == n - 1) for n in lengths for i in range(n)]
    first = [float(i == 0) for n in lengths for i in range(n)]
    every = [1.0] * len(last)
    choices = tf.constant([last, every, first], block.dtype)
    parts = [block.gradient(block.rows(r)) for r in chain(*calls)]
    best, explains = _compare(parts, block.to_matrix(gradients), choices)
    chosen = tf.split(choices[best], lengths)
    merged = [
        _merge(records, tf.unstack(own, len(records)))
        for records, own in zip(calls, chosen, strict=True)
    ]
    return merged, explains


def _compare(
    parts: Sequence[tf.Tensor], gradient: tf.Tensor, choices: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The first choice that makes the gradient, or else its direction.

    Returns:
        Its place, or that of the nearest, and whether there is one.
    """
    rows = [tf.reshape(part, [1, -1]) for part in (*parts, gradient)]
    matrix = tf.concat(rows, 0)
    products = tf.matmul(matrix, matrix, transpose_b=True)
    gram, along, size = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    lengths = tf.reduce_sum(tf.matmul(choices, gram) * choices, 1)
    cosines = tf.linalg.matvec(choices, along)
    errors = size - 2 * cosines + lengths
    shares = tf.math.divide_no_nan(tf.square(cosines), lengths * size)
    # The opposite direction is another one.
    sines = tf.where(cosines > 0, 1 - shares, tf.ones_like(shares))
    same, parallel = errors <= _TOLERANCE * size, sines <= _TOLERANCE
    best = tf.where(
        tf.reduce_any(same),
        _first(same),
        tf.where(tf.reduce_any(parallel), _first(parallel), tf.argmin(sines)),
    )
    return best, tf.reduce_any(tf.logical_or(same, parallel))


def _first(flags: tf.Tensor) -> tf.Tensor:
    """Place of the first flag that is set."""
    return tf.argmax(tf.cast(flags, tf.int32))


def _merge(records: Sequence[Record], chosen: Sequence[tf.Tensor]) -> Record:
    """One record of a call, its gradient the sum of the chosen ones."""
    gradients = [
        tf.math.multiply_no_nan(r.gradient, tf.cast(c, r.gradient.dtype))
        for r, c in zip(records, chosen, strict=True)
    ]
    return dataclasses.replace(records[-1], gradient=tf.add_n(gradients))
