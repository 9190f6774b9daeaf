"""Batches as they come: a replica whose data has ended is told of."""

import sys
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.capture.loss_terms import LossTerms
from tfkfac.compat.graphs import in_xla

# So many batches without an example are no coincidence.
_MANY = 20


def note_batch(
    terms: Sequence[LossTerms], empty: tf.Variable, replica: int
) -> None:
    """Says where all batches of a replica have long been without examples.

    Keras and TensorFlow go on with empty batches, where the data of one worker
    ends before that of the others.

    Args:
        terms: The terms of the losses of this replica's batch.
        empty: Counts its batches in a row that had none.
        replica: Its number among all.
    """
    count = tf.add_n([loss.count for loss in terms])
    now = tf.where(count > 0, tf.zeros_like(empty), empty + 1)
    empty.assign(now)
    if in_xla():  # which cannot print
        return

    def report() -> tf.Tensor:
        tf.print(
            f"tfkfac: the last {_MANY} batches of replica {replica} had no "
            "examples. Has its data ended before that of others?",
            output_stream=sys.stderr,
        )
        return tf.constant(0)

    tf.cond(tf.equal(now, _MANY), report, lambda: tf.constant(0))
