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


def last_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers with weights that are nearest to a model's outputs.

    Of a model that is not functional it is the last one. It relies on
    `_keras_history` of what a functional model returns, the operation and which
    of its `_inbound_nodes` has returned it, with its `input_tensors`.
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None))
    if not all(isinstance(output, keras.KerasTensor) for output in outputs):
        return [layer for layer in model.layers if layer.weights][-1:]
    found: list[keras.layers.Layer] = []
    for output in outputs:
        tensors: list[Any] = [output]
        near: list[Any] = []
        while tensors and not near:
            calls = [tensor._keras_history[:2] for tensor in tensors]
            near = [op for op, _ in calls if getattr(op, "weights", None)]
            nodes = [op._inbound_nodes[index] for op, index in calls]
            tensors = [one for node in nodes for one in node.input_tensors]
        found += near
    inside = (
        last_layers(layer) if isinstance(layer, keras.Model) else [layer]
        for layer in found
    )
    return [layer for layers in inside for layer in layers]


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
