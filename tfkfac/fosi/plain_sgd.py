"""Plain SGD, an inner optimizer whose changes are sums of gradients."""

import keras
import tensorflow as tf

from tfkfac.compat.optimizers import sgd_momenta
from tfkfac.curvature.hessian import flat_space
from tfkfac.training.job import Job


def is_plain_sgd(job: Job) -> bool:
    """Whether the inner optimizer's change is a sum of the gradients it got.

    That is SGD, with momentum or without, that neither clips nor accumulates
    them nor decays weights, and does not round them to less precision than
    that of the directions.
    """
    inner, weights = job.inner_optimizer, job.model.trainable_variables
    others = (
        inner.weight_decay,
        inner.clipnorm,
        inner.clipvalue,
        inner.global_clipnorm,
        inner.gradient_accumulation_steps,
    )
    return (
        type(inner) is keras.optimizers.SGD
        and not any(others)
        and {tf.as_dtype(v.dtype) for v in weights}
        == {flat_space(weights).dtype}
    )


def has_momentum(job: Job) -> bool:
    """Whether it is plain SGD with momentum."""
    return is_plain_sgd(job) and job.inner_optimizer.momentum > 0


def flat_momentum(job: Job, length: int) -> tf.Tensor | None:
    """SGD's momentum as a vector that ends in zeros; None if it has none.

    Args:
        job: The job.
        length: Length of the vector.
    """
    if not has_momentum(job):
        return None
    weights = job.model.trainable_variables
    momenta = sgd_momenta(job.inner_optimizer, weights)
    return flat_space(weights).join([b.value for b in momenta], length)
