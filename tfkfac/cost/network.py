"""What a step of the model itself takes, and how many rows its layers have."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import overridden
from tfkfac.factors import Diagonal

Shape = tuple[int, ...]


class Call(NamedTuple):
    """The shapes of the first input and the first output of a call."""

    inputs: Shape
    outputs: Shape


class Network:
    """The calls of a model's layers for a batch. It is traced, not run.

    Args:
        model: A functional or sequential model.
        batch: Examples of a batch.
        size: What an unknown size of an input is; None if there is none.

    Attributes:
        elements: Number of outputs of all layers.

    Raises:
        ValueError: If the model has no known inputs, or a size is missing.
    """

    def __init__(
        self, model: keras.Model, batch: int, size: int | None = None
    ) -> None:
        self._calls: dict[int, list[Call]] = {}
        specs = keras.tree.map_structure(
            lambda tensor: _spec(tensor, batch, size), _inputs_of(model)
        )
        layers = [one for one in all_layers(model) if one is not model]
        with contextlib.ExitStack() as stack:
            for layer in layers:
                note = self._noting(layer)
                stack.enter_context(overridden(layer, "call", note))
            run = tf.function(lambda x: model(x, training=True))
            run.get_concrete_function(specs)
        self.elements = sum(
            math.prod(call.outputs)
            for layer in layers
            if not children(layer)
            for call in self._calls[id(layer)]
        )

    def _noting(self, layer: keras.layers.Layer) -> Callable[..., Any]:
        calls = self._calls.setdefault(id(layer), [])

        def call(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outputs = below(*args, **kwargs)
            first, *_ = keras.tree.flatten((args, kwargs))
            last, *_ = keras.tree.flatten(outputs)
            if tf.is_tensor(first) and tf.is_tensor(last):
                calls.append(Call(tuple(first.shape), tuple(last.shape)))
            return outputs

        return call

    def calls(self, block: Block) -> Sequence[Call]:
        """The calls of a block's layer."""
        return self._calls[id(block.layer)]

    def rows(self, block: Block) -> int:
        """Rows of a block; of a shared layer, those of all its calls."""
        g = block.factors["G"]
        # Not the outputs of one half of a separable convolution.
        width = getattr(block.layer, "filters", None)
        width = width or math.prod(g.stack_shape) * g.size
        return sum(math.prod(c.outputs) // width for c in self.calls(block))

    def multiplications(self, blocks: Sequence[Block]) -> int:
        """Those of a forward pass through the layers of blocks.

        An embedding and what only scales multiply next to nothing.
        """
        return sum(
            self.rows(block) * math.prod(block.gradient_shape)
            for block in blocks
            if not isinstance(block.factors.get("A"), Diagonal | None)
        )


def _inputs_of(model: keras.Model) -> Any:
    try:
        # A sequential model knows its one input by this name only.
        single = len(model.inputs) == 1
        return model.inputs[0] if single else model.input
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"Model '{model.name}' must be functional or sequential, with "
            f"known inputs. {error}"
        ) from error


def _spec(
    tensor: keras.KerasTensor, batch: int, size: int | None
) -> tf.TensorSpec:
    sizes = [size if n is None else n for n in tensor.shape[1:]]
    if None in sizes:
        raise ValueError(
            f"Input '{tensor.name}' has the shape {tensor.shape}, whose sizes "
            "but the first must be known."
        )
    return tf.TensorSpec([batch, *sizes], tensor.dtype)
