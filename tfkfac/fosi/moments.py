"""Batch moments synchronised over some of the replicas only."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.trace import capturing
from tfkfac.compat.gradients import exact_second_derivatives
from tfkfac.compat.overrides import replace_moments


def synchronized_layers(
    layers: list[keras.layers.Layer],
) -> list[keras.layers.Layer]:
    """Those of some layers that synchronise their moments."""
    return [
        layer
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.synchronized
    ]


def tap_moments(
    layer: keras.layers.Layer, total: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """Lets a layer sum up its moments in another way in training steps.

    Args:
        layer: A synchronised `BatchNormalization`.
        total: Differentiable sum over the replicas that train.
    """

    def moments(below: Callable[..., Any], /, *args: Any) -> Any:
        if not capturing():
            return below(*args)
        with exact_second_derivatives(total):
            return below(*args)

    replace_moments(layer, moments)
