"""What Keras keeps to itself of layers and of the tensors between them."""

from typing import Any

import keras
import tensorflow as tf

_MASK = "_keras_mask"


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that a layer holds as attributes, not those inside of them.

    It relies on `_flatten_layers`; in public Keras offers the like for models
    only.
    """
    return layer._flatten_layers(include_self=False, recursive=False)


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A layer and all layers inside of it, each once.

    It relies on `_flatten_layers`.
    """
    return layer._flatten_layers()


def called_with(layer: keras.layers.Layer, flag: str) -> bool:
    """Whether a functional model calls a layer with a keyword that is true.

    What other layers and models do in their `call` is not seen. It relies on
    `_inbound_nodes`, one for each such call, with its `arguments`.
    """
    nodes = layer._inbound_nodes
    return any(node.arguments.kwargs.get(flag) for node in nodes)


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that a tensor carries, or None.

    It relies on Keras keeping it as the tensor's attribute `_keras_mask`.
    """
    return getattr(tensor, _MASK, None)


def pass_mask(source: Any, target: tf.Tensor) -> None:
    """Makes a tensor carry the mask of another one, if that has any.

    It relies on what `mask_of` does.
    """
    mask = mask_of(source)
    if mask is not None:
        setattr(target, _MASK, mask)
