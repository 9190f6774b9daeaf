"""Which of several backward passes a gradient is of.

Somebody may take two gradients of one forward pass: of two losses, of which
the sum is applied; of one loss for another model, as in a GAN; of a loss that
itself has a gradient in it. Each leaves a record for the same call of a layer.
The gradient that is applied decides: it is the product of the inputs with the
recorded gradients of some of the passes.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks.base import Block
from tfkfac.capture.record import Record

# Records of one call after another, in the order in which they came.
Calls = Sequence[Sequence[Record]]

# Squared relative distance of a gradient from what it should be.
_TOLERANCE = 1e-4
# With more records than this only the likeliest choices are tried.
_MOST_RECORDS = 6


def records_of(
    block: Block, calls: Calls, gradients: Sequence[tf.Tensor]
) -> tuple[list[Record], tf.Tensor | None]:
    """Makes one record of each call.

    Args:
        block: The block.
        calls: What the calls of its layer left behind.
        gradients: The gradients of its weights on this replica. They may be
            off by a factor, as clipping makes them.

    Returns:
        The records, and whether they explain the gradients; None if there was
        no choice.
    """
    if all(len(records) == 1 for records in calls):
        return [records[0] for records in calls], None
    flat = [record for records in calls for record in records]
    parts = [block.gradient(block.rows(record)) for record in flat]
    choices = tf.constant(_choices([len(r) for r in calls]), block.dtype)
    best, explains = _compare(parts, block.to_matrix(gradients), choices)
    chosen = tf.unstack(choices[best])
    merged, begin = [], 0
    for records in calls:
        own = chosen[begin : begin + len(records)]
        begin += len(records)
        merged.append(_merge(records, own))
    return merged, explains


def _choices(lengths: Sequence[int]) -> list[list[int]]:
    """Zeros and ones for the records, the likeliest choices first.

    The last record of each call, then all of them, then any others.
    """
    last = [int(i == n - 1) for n in lengths for i in range(n)]
    likely = [last, [1] * sum(lengths)]
    if sum(lengths) > _MOST_RECORDS:
        return likely
    rest = [list(c) for c in itertools.product((0, 1), repeat=sum(lengths))]
    return likely + [c for c in rest if any(c) and c not in likely]


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
        first(same),
        tf.where(tf.reduce_any(parallel), first(parallel), tf.argmin(sines)),
    )
    return best, tf.reduce_any(tf.logical_or(same, parallel))


def first(flags: tf.Tensor) -> tf.Tensor:
    """Place of the first flag that is set."""
    return tf.argmax(tf.cast(flags, tf.int32))


def _merge(records: Sequence[Record], chosen: Sequence[tf.Tensor]) -> Record:
    """One record of a call, its gradient the sum of the chosen ones."""
    gradients = [
        tf.math.multiply_no_nan(r.gradient, tf.cast(c, r.gradient.dtype))
        for r, c in zip(records, chosen, strict=True)
    ]
    return dataclasses.replace(records[-1], gradient=tf.add_n(gradients))
