"""What one call of a layer left behind."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Record:
    """What one call of a layer left behind.

    Attributes:
        inputs: The layer's input.
        gradient: Gradient of the (scaled) loss at the pre-activation.
        mask: Keras mask of the input, or None.
        kwargs: The other arguments of the call, by name.
        moments: Mean and variance that a batch normalisation computed.
        order: Grows in the order in which gradients came: a smaller one is of
            a layer nearer to the loss.
        output: The pre-activation, for gradients of something else.
    """

    inputs: Any
    gradient: tf.Tensor
    mask: tf.Tensor | None = None
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moments: tuple[tf.Tensor, tf.Tensor] | None = None
    order: int = 0
    output: tf.Tensor | None = None
