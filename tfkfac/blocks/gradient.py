"""The gradient of a layer as a solver sees it."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class LayerGradient:
    """What a solver preconditions.

    Attributes:
        matrix: Gradient of the loss, `([groups,] inputs, outputs)`.
    """

    matrix: tf.Tensor
