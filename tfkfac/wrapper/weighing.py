"""The weight of a replica's loss in that of all of them."""

import dataclasses

import tensorflow as tf

from tfkfac.capture.loss_batch import LossTap
from tfkfac.capture.loss_terms import weigh
from tfkfac.training.arrivals import note_batch
from tfkfac.training.job import Job
from tfkfac.wrapper.shares import measure_loss


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
    batch = tap.take()
    if not batch.terms or batch.measure is not None:
        return loss
    note_batch(batch.terms, job.own(job.empty), job.rank)
    group = job.group(f"loss {batch.ordinal}").among(peers)
    measure = job.together(
        lambda: measure_loss(batch.terms, group, job.topology.replicas, True)
    )
    tap.note(dataclasses.replace(batch, measure=measure))
    return weigh(loss, batch.terms, measure.shares)
