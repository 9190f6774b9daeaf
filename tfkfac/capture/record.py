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
    """

    inputs: Any
    gradient: tf.Tensor
    mask: tf.Tensor | None = None
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moments: tuple[tf.Tensor, tf.Tensor] | None = None
