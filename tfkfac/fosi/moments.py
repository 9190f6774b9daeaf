"""Batch moments synchronised over some of the replicas only."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.trace import capturing
from tfkfac.compat.second_order import exact_second_derivatives

_TAP = "_tfkfac_moments_tap"


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
    release_moments(layer)
    original = layer._moments

    @functools.wraps(original)
    def moments(*args: Any) -> Any:
        if not capturing():
            return original(*args)
        with exact_second_derivatives(total):
            return original(*args)

    object.__setattr__(layer, "_moments", moments)
    object.__setattr__(layer, _TAP, True)


def release_moments(layer: keras.layers.Layer) -> None:
    """Undoes `tap_moments`."""
    if vars(layer).get(_TAP):
        object.__delattr__(layer, _TAP)
        object.__delattr__(layer, "_moments")
