"""Statistics of a subsample of the examples of a batch."""

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from tfkfac.blocks.base import Block
from tfkfac.blocks.rows import Rows, size_of
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import call_of_any_size

# The measured part: a quarter, but so many of all workers together. Factors of
# a few examples cost accuracy, and a small batch's are cheap.
_QUARTER, _LEAST = 0.25, 64


class Subsample(NamedTuple):
    """The part of each batch that statistics are taken of.

    Attributes:
        fraction: Share of the examples, in (0, 1].
        turn: Number of parts taken before, int64. The next one has other
            examples.
        least: Least number of examples, if there are as many.
    """

    fraction: float
    turn: tf.Tensor
    least: int = 1


def choose_subsample(
    fraction: float | None, turn: tf.Tensor, workers: int
) -> Subsample | None:
    """The part of a worker's batch; None is all of it.

    Args:
        fraction: Share of the examples; None is the measured part.
        turn: Number of parts taken before, int64.
        workers: Number of workers whose statistics are added up.
    """
    if fraction is None:
        return Subsample(_QUARTER, turn, math.ceil(_LEAST / workers))
    return Subsample(fraction, turn) if fraction < 1 else None


class Examples:
    """Some examples of a batch, evenly spaced and never none of several.

    Not the first ones: batches may be sorted, and the first axis of a layer
    may be time or patches. Turn by turn each example is taken as often as any
    other, so that what they come to, times `weight`, has no bias.

    Attributes:
        weight: Number of examples of the batch that each stands for, float64.

    Args:
        size: Number of examples of the batch.
        part: The part to take.
    """

    def __init__(self, size: int | tf.Tensor, part: Subsample) -> None:
        def choose(
            size: tf.Tensor, turn: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            share = part.fraction * tf.cast(size, tf.float64)
            count = tf.cast(tf.math.ceil(share), tf.int64)
            count = tf.maximum(count, tf.minimum(size, part.least))
            # Nothing is taken of an empty batch, and divided by.
            some, divisor = tf.maximum(size, 1), tf.maximum(count, 1)
            indices = (turn * count % some + tf.range(count) * size) // divisor
            return indices, tf.cast(size, tf.float64) / tf.cast(
                divisor, tf.float64
            )

        self._indices, self.weight = call_of_any_size(
            ("examples", part.fraction, part.least),
            choose,
            tf.cast(size, tf.int64),
            tf.convert_to_tensor(part.turn, tf.int64),
        )

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Takes them of a tensor with the batch, or 1 for all, first."""
        taken = call_of_any_size("take examples", _take, tensor, self._indices)
        taken.set_shape([None, *tensor.shape[1:]])
        return taken

    def of_optional(self, tensor: tf.Tensor | None) -> tf.Tensor | None:
        """The same, and None of None."""
        return None if tensor is None else self.of(tensor)


def _take(tensor: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    size = tf.shape(tensor, tf.int64)[0]
    return tf.gather(tensor, indices % tf.maximum(size, 1))


def subsample_rows(
    block: Block, record: Record, part: Subsample
) -> tuple[Rows, int | tf.Tensor, Examples]:
    """Rows of some of the examples of a call.

    They are chosen before there are rows, if the record can be taken apart by
    examples: that is what makes it cheap.

    Args:
        block: The block.
        record: The record of the call.
        part: The part to take.

    Returns:
        The rows, the number of examples of the whole batch, and the examples
        that have been taken.
    """
    if block.examples_first and _is_plain(record):
        size = size_of(record.gradient, 0)
        examples = Examples(size, part)
        cut = dataclasses.replace(
            record,
            inputs=examples.of(record.inputs),
            gradient=examples.of(record.gradient),
            mask=examples.of_optional(record.mask),
        )
        return block.rows(cut), size, examples
    rows = block.rows(record)
    size = size_of(rows.g, 0)
    examples = Examples(size, part)
    some = Rows(
        examples.of_optional(rows.a),
        examples.of(rows.g),
        examples.of_optional(rows.mask),
    )
    return some, size, examples


def _is_plain(record: Record) -> bool:
    """True if only input, gradient and mask can be of single examples."""
    others = tf.nest.flatten(dict(record.kwargs))
    return isinstance(record.inputs, tf.Tensor) and all(
        isinstance(value, (bool, int, float, str, type(None)))
        for value in others
    )
