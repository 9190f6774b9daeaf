"""A replica's loss in that of all, and warnings of batches without examples."""

import dataclasses
import sys
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.compat.graphs import in_xla
from tfkfac.loss.batch import LossBatch, LossTap
from tfkfac.loss.shares import measure_loss, weigh
from tfkfac.loss.terms import LossTerms
from tfkfac.training.job import Job

# So many batches without an example are no coincidence.
_MANY = 20


def weigh_loss(loss: tf.Tensor, job: Job, peers: tuple[int, ...]) -> tf.Tensor:
    """Weighs a replica's loss by its share of the terms, see `LossMeasure`.

    Under the tape, so that what flows back through synchronised layers to
    other replicas has the right weight too. The step knows of it by the batch.

    Args:
        loss: The loss that the model's `compute_loss` has returned.
        job: The job.
        peers: The replicas that share the mean with this one.
    """
    tap = LossTap.open(job.model)
    batch = tap.take_last(LossBatch())
    if not batch.terms or batch.measure is not None:
        return loss
    note_batch(batch.terms, job.own(job.empty), job.rank)
    group = job.group(f"loss {batch.ordinal}").among(peers)
    measure = job.together(
        lambda: measure_loss(batch.terms, group, job.topology.replicas, True)
    )
    tap.note(dataclasses.replace(batch, measure=measure))
    return weigh(loss, batch.terms, measure.shares)


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
