"""One step of a worker."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The numbers of a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


Gradients = list[tf.Tensor | None]


class Update(NamedTuple):
    """What an optimizer lets its inner optimizer do in a step.

    Attributes:
        gradients: The gradients for it.
        after: Called where the inner optimizer has changed the weights, before
            it averages or constrains them.
    """

    gradients: Gradients
    after: Callable[[], None] | None = None
