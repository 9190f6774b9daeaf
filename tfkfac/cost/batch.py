"""The calls of a model's layers, and the work of a worker's batch."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import keras
import tensorflow as tf

from tfkfac.blocks import Block
from tfkfac.blocks.statistics import choose_subsample
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import overridden
from tfkfac.factors import Diagonal

Shape = tuple[int, ...]


class CallShapes(NamedTuple):
    """Shapes of the first input and the first output of a call."""

    inputs: Shape
    outputs: Shape


class Network:
    """The calls of a model's layers for a batch; traced, not run.

    Args:
        model: A functional or sequential model.
        batch: Examples of a batch.
        size: The value of unknown sizes of an input; None if there is none.

    Attributes:
        elements: Number of outputs of all layers.

    Raises:
        ValueError: If the model has no known inputs, or a size is missing.
    """

    def __init__(
        self, model: keras.Model, batch: int, size: int | None = None
    ) -> None:
        self._calls: dict[int, list[CallShapes]] = {}
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
                calls.append(CallShapes(tuple(first.shape), tuple(last.shape)))
            return outputs

        return call

    def calls(self, block: Block) -> Sequence[CallShapes]:
        """The calls of a block's layer."""
        return self._calls[id(block.layer)]

    def rows(self, block: Block) -> int:
        """Rows of a block; for a shared layer, those of all its calls."""
        g = block.factors["G"]
        # Not the outputs of one half of a separable convolution.
        width = getattr(block.layer, "filters", None)
        width = width or math.prod(g.stack_shape) * g.size
        return sum(math.prod(c.outputs) // width for c in self.calls(block))

    def multiplications(self, blocks: Sequence[Block]) -> int:
        """Multiplications of a forward pass through the layers of blocks.

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
        return model.inputs[0] if len(model.inputs) == 1 else model.input
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


@dataclasses.dataclass(frozen=True)
class Batch:
    """The work of a batch of `size` examples, the same under all plans.

    Attributes:
        fraction: Share of them that statistics take, see `KFAC`.
        forward: Multiplications of a forward pass.
        outputs: Number of outputs of all layers.
        rows: Rows of each block.
        statistics: Multiplications of each block's, of all examples.
        read: Elements of the rows or images that these take.
    """

    size: int
    fraction: float | None
    forward: float
    outputs: float
    rows: Sequence[int]
    statistics: Sequence[float]
    read: Sequence[float]

    @classmethod
    def of(
        cls,
        network: Network,
        blocks: Sequence[Block],
        size: int,
        fraction: float | None,
        every: Sequence[Block],
    ) -> Self:
        """Counts the work of a batch of a network.

        `every` are its blocks if none of the layers is skipped.
        """
        counts = [_statistics(network, block) for block in blocks]
        return cls(
            size,
            fraction,
            network.multiplications(every),
            network.elements,
            [network.rows(block) for block in blocks],
            [multiplications for multiplications, _ in counts],
            [elements for _, elements in counts],
        )

    def share(self, observers: int) -> float:
        """Share of the examples that the statistics of a worker take.

        Those of all observers are added up.
        """
        part = choose_subsample(
            self.fraction, tf.constant(0, tf.int64), observers
        )
        if part is None:
            return 1.0
        least = min(self.size, part.least)
        return max(least, math.ceil(part.fraction * self.size)) / self.size


def _statistics(network: Network, block: Block) -> tuple[float, float]:
    """Multiplications of a block's statistics, and elements they take."""
    calls, rows = network.calls(block), network.rows(block)
    g = block.factors["G"]
    outputs = sum(math.prod(call.outputs) for call in calls)
    if "A" not in block.factors:  # an example's gradient, element by element
        return 0.0, 2.0 * outputs
    of_g = rows * g.multiplications
    if isinstance(block.factors["A"], Diagonal):  # tokens are counted
        return of_g, outputs
    inputs = sum(
        block.input_multiplications(call.inputs, rows // len(calls))
        for call in calls
    )
    patches = rows * math.prod(block.gradient_shape[:-1])
    return inputs + of_g, patches + outputs
