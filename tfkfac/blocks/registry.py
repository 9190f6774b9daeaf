"""Table of blocks by layer class, and assignment of blocks to a model."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfkfac.blocks.base import Block
from tfkfac.blocks.conv import (
    ConvBlock,
    ConvTransposeBiasBlock,
    ConvTransposeBlock,
    DepthwiseConvBlock,
    SeparableDepthwiseBlock,
    SeparablePointwiseBlock,
)
from tfkfac.blocks.dense import DenseBlock, EinsumDenseBlock
from tfkfac.blocks.embedding import (
    EmbeddingBlock,
    PositionEmbeddingBlock,
    ProjectionBlock,
    ReversibleEmbeddingBlock,
)
from tfkfac.blocks.normalization import (
    NormalizationBlock,
    PReLUBlock,
    ShiftedNormalizationBlock,
)
from tfkfac.blocks.time_distributed import TimeDistributedBlock
from tfkfac.capture.taps import Tap, before_first_call
from tfkfac.capture.walk import LayerRule, Node, unbuilt, walk
from tfkfac.factors import Dense, Limit

# `Leftover.reason` of embeddings in spectral steps, see `without`.
EXCLUDED = "spectral steps leave embeddings to the rest optimizer"


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Uncovered trainable variables of a layer, and the reason.

    `is_recurrent` is the field of the layer's `Node`.
    """

    path: str
    variables: tuple[keras.Variable, ...]
    reason: str
    is_recurrent: bool = False

    @property
    def weights(self) -> int:
        """Number of weights."""
        return count_weights(self.variables)


@dataclasses.dataclass(frozen=True)
class Registry:
    """Blocks of a model, and its uncovered variables."""

    blocks: tuple[Block, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def uncovered(self) -> tuple[Leftover, ...]:
        """`leftovers`, and the blocks skipped in the last traced step."""
        skipped = [
            Leftover(block.path, tuple(block.variables), block.skip_reason)
            for block in self.blocks
            if block.skip_reason is not None
        ]
        return (*self.leftovers, *skipped)

    @property
    def covered(self) -> int:
        """Number of preconditioned weights."""
        active = [b for b in self.blocks if b.skip_reason is None]
        return sum(count_weights(block.variables) for block in active)

    def agreement(self) -> dict[str, Any]:
        """Values that must be equal on all workers, JSON-serializable."""
        layers = [
            [block.path, block.kind, [f.text for f in block.factors.values()]]
            for block in self.blocks
        ]
        uncovered = [[item.path, item.reason] for item in self.leftovers]
        return {"layers": layers, "layers without curvature": uncovered}


def tap_layers(
    model: keras.Model,
    skip_layers: Sequence[LayerRule],
    only_layers: Sequence[LayerRule] | None,
    owner: object,
    without: tuple[type[Block], ...] = (),
) -> None:
    """Start to record the calls of each trainable layer that has a block.

    Layers whose blocks are all of the classes `without` are skipped.
    Runs again when a layer that is not built yet is called the first time.
    """
    for node in walk(model, skip_layers, only_layers):
        types = block_types(node.layer).values()
        supported = not all(issubclass(cls, without) for cls in types)
        if node.reason is None and node.layer.trainable and supported:
            Tap.open(node.tapped, owner)
    arguments = model, skip_layers, only_layers, owner, without
    for layer in unbuilt(model):
        if not block_types(layer):
            before_first_call(layer, functools.partial(tap_layers, *arguments))


def build_registry(
    model: keras.Model,
    skip_layers: Sequence[LayerRule],
    only_layers: Sequence[LayerRule] | None = None,
    limit: Limit = Block.limit,
    without: tuple[type[Block], ...] = (),
    dense_limit: Limit | None = None,
) -> Registry:
    """Create blocks with factors up to `limit`, except of classes `without`.

    `dense_limit` is the limit of `Dense` and `EinsumDense` layers, if it
    differs.
    """
    limits = limit, dense_limit or limit
    remaining = {id(v): v for v in model.trainable_variables}
    blocks: list[Block] = []
    leftovers: list[Leftover] = []
    for node in walk(model, skip_layers, only_layers):
        layer, reason = node.layer, node.reason or Tap.reason(node.tapped)
        new_blocks: list[Block] = []
        if reason is None and layer.built and layer.trainable:
            new_blocks, reason = _blocks_of(node, remaining, limits, without)
            blocks += new_blocks
        uncovered = [v for v in layer.trainable_variables if id(v) in remaining]
        for variable in uncovered:
            del remaining[id(variable)]
        if uncovered:
            cause = "not in the block of" if new_blocks else "no block for"
            reason = reason or f"{cause} {type(layer).__name__}"
            leftovers.append(
                Leftover(node.path, tuple(uncovered), reason, node.is_recurrent)
            )
    return Registry(tuple(blocks), tuple(leftovers))


def _blocks_of(
    node: Node,
    remaining: dict[int, keras.Variable],
    limits: tuple[Limit, Limit],
    without: tuple[type[Block], ...],
) -> tuple[list[Block], str | None]:
    """Create the blocks of a layer; also return why weights are uncovered."""
    blocks: list[Block] = []
    excluded: str | None = None
    outer = node.distributor
    for prefix, block_class in block_types(node.layer).items():
        if issubclass(block_class, without):
            excluded = EXCLUDED
            continue
        reason = block_class.unsupported(node.layer)
        if outer is not None:
            reason = reason or TimeDistributedBlock.unsupported(outer)
        if reason is not None:
            return blocks, excluded or reason
        parent, slash, layer_name = node.path.rpartition("/")
        path = f"{parent}{slash}{prefix}{layer_name}"
        try:
            block = block_class(node.layer, path)
        except AttributeError as error:
            raise ValueError(
                f"Layer '{path}' lacks an attribute that its block, "
                f"{block_class.__name__}, needs: {error}. See "
                "`tfkfac.register_block`."
            ) from error
        limit = limits[type(block) in (DenseBlock, EinsumDenseBlock)]
        block.limit = limit
        if not block.variables:
            continue
        if outer is not None:
            block = TimeDistributedBlock(outer, block)
        if not all(id(v) in remaining for v in block.variables):
            reason = "kernel frozen or shared with another layer"
            return blocks, excluded or reason
        for name, factor in block.factors.items():
            # Check the size here, as a custom block may ignore `self.limit`.
            if isinstance(factor, Dense) and limit.exceeded(factor.size):
                return blocks, excluded or (
                    f"factor {name} of {factor.text} exceeds "
                    f"max_factor_dim={limit.size}"
                )
        blocks.append(block)
        for variable in block.variables:
            del remaining[id(variable)]
    return blocks, excluded


def count_weights(variables: Sequence[keras.Variable]) -> int:
    """Count the elements of variables."""
    return sum(math.prod(variable.shape) for variable in variables)


# Block classes of a layer class, by the prefix of the block's path.
BlockTypes = dict[str, type[Block]]

_SEPARABLE: BlockTypes = {
    "depthwise/": SeparableDepthwiseBlock,
    "pointwise/": SeparablePointwiseBlock,
}
_TRANSPOSED: BlockTypes = {
    "": ConvTransposeBlock,
    "bias/": ConvTransposeBiasBlock,
}
BLOCKS: dict[type[keras.layers.Layer], BlockTypes] = {
    keras.layers.Dense: {"": DenseBlock},
    keras.layers.Conv1D: {"": ConvBlock},
    keras.layers.Conv2D: {"": ConvBlock},
    keras.layers.Conv3D: {"": ConvBlock},
    keras.layers.Conv1DTranspose: _TRANSPOSED,
    keras.layers.Conv2DTranspose: _TRANSPOSED,
    keras.layers.Conv3DTranspose: _TRANSPOSED,
    keras.layers.DepthwiseConv1D: {"": DepthwiseConvBlock},
    keras.layers.DepthwiseConv2D: {"": DepthwiseConvBlock},
    keras.layers.SeparableConv1D: _SEPARABLE,
    keras.layers.SeparableConv2D: _SEPARABLE,
    keras.layers.EinsumDense: {"": EinsumDenseBlock},
    keras.layers.Embedding: {"": EmbeddingBlock},
    keras.layers.ReversibleEmbedding: {
        "": ReversibleEmbeddingBlock,
        "reverse/": ProjectionBlock,
    },
    keras.layers.BatchNormalization: {"": NormalizationBlock},
    keras.layers.LayerNormalization: {"": NormalizationBlock},
    keras.layers.GroupNormalization: {"": NormalizationBlock},
    keras.layers.RMSNormalization: {"": NormalizationBlock},
    keras.layers.PReLU: {"": PReLUBlock},
}
"""Block classes of each layer class, by the prefix of the block's path."""
# Normalisation layers of keras-hub: RMS of the last axis, with a scale only.
_RMS_OF_KERAS_HUB = (
    "EdRecRMSNormalization",
    "Gemma3nAudioCumulativeGroupNorm",
    "Gemma3nRMSNorm",
    "GptOssLayerNormalization",
    "LlamaLayerNorm",
    "MistralLayerNormalization",
    "MixtralLayerNormalization",
    "Phi3LayerNorm",
    "Qwen3LayerNorm",
    "Qwen3MoeLayerNorm",
    "Qwen3_5LayerNorm",
    "Qwen3_5RMSNormGated",
    "QwenLayerNorm",
    "QwenMoeLayerNorm",
    "RMSNormalization",
    "RmsNorm2d",
    "RoformerNorm",
    "T5LayerNorm",
)
# Blocks of layer classes in optional packages, by (package, class name).
NAMED_BLOCKS: dict[tuple[str, str], BlockTypes] = {
    ("keras_hub", "PositionEmbedding"): {"": PositionEmbeddingBlock},
    **{
        ("keras_hub", name): {"": ShiftedNormalizationBlock}
        for name in _RMS_OF_KERAS_HUB
    },
}
# Blocks registered by the user. They take precedence over the tables above.
_registered: dict[type[keras.layers.Layer], BlockTypes] = {}


def block_types(layer: keras.layers.Layer) -> BlockTypes:
    """Return the block classes of a layer by prefix, possibly empty.

    A subclass of a known class has the same blocks, unless it overrides `call`
    or `convolution_op`: its computation is then unknown.

    Args:
        layer: The layer.
    """
    for base in type(layer).__mro__:
        types = _types_of_class(base)
        if types is not None:
            same_call = all(
                getattr(type(layer), name, None) is getattr(base, name, None)
                for name in ("call", "convolution_op")
            )
            return types if same_call else {}
    return {}


def _types_of_class(layer_class: type) -> BlockTypes | None:
    """Return the block classes of a layer class, ignoring its bases."""
    for table in (_registered, BLOCKS):
        if layer_class in table:
            return table[layer_class]
    package, _, _ = layer_class.__module__.partition(".")
    return NAMED_BLOCKS.get((package, layer_class.__name__))


def register_block(
    layer_class: type[keras.layers.Layer],
    *,
    like: type[keras.layers.Layer] | None = None,
    block: type[Block] | None = None,
) -> None:
    """Register a curvature block for the layers of a class.

    `KFAC` has no block for a custom layer class, nor for a subclass of a Keras
    layer that overrides `call`, because it does not know their computation.

    If a layer computes the same as another layer class from the same
    attributes, use `like`. The attributes of `keras.layers.Dense` are
    `kernel`, and optionally `bias` and `activation`:

    >>> class MyDense(keras.layers.Dense):
    ...     def call(self, x):
    ...         return self.activation(x @ self.kernel + self.bias)
    >>> tfkfac.register_block(MyDense, like=keras.layers.Dense)

    Otherwise, write a block. `tfkfac.blocks` has three base classes:
    `PerExampleBlock` for a few weights without a kernel, `MatrixBlock` for a
    matrix-shaped kernel, and `Block` for any other layer. For example:

    ```python
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.gain = self.add_weight((shape[-1],), "ones", name="gain")

        def call(self, x):
            return x * self.gain


    class ScaleBlock(tfkfac.blocks.PerExampleBlock):
        kind = "Scale"

        @property
        def variables(self):
            return [self.layer.gain]

        def example_gradients(self, record):
            products = self.cast(record.inputs) * self.cast(record.gradient)
            positions = list(range(1, products.shape.rank - 1))
            return [tf.reduce_sum(products, positions)]


    tfkfac.register_block(Scale, block=ScaleBlock)
    ```

    The registration applies to models that are compiled or attached
    afterwards. It replaces a built-in block and an earlier registration of the
    class. It includes subclasses of the class that do not override `call`.

    Args:
        layer_class: The layer class.
        like: A layer class with a built-in or registered block. Defaults to
            None.
        block: A subclass of `tfkfac.blocks.Block`. Defaults to None.

    Raises:
        TypeError: If `layer_class` is not a subclass of `keras.layers.Layer`,
            or if `block` is not a complete subclass of `tfkfac.blocks.Block`.
        ValueError: If both or neither of `like` and `block` are given, or if
            `like` has no block.
    """
    if not _is_class(layer_class, keras.layers.Layer):
        raise TypeError(
            "Argument `layer_class` must be a subclass of `keras.layers.Layer`."
            f" Received: layer_class={layer_class!r}"
        )
    if (like is None) == (block is None):
        raise ValueError(
            "One of the arguments `like` and `block` must be given. "
            f"Received: like={like!r}, block={block!r}"
        )
    if block is not None:
        if not _is_class(block, Block):
            raise TypeError(
                "Argument `block` must be a subclass of `tfkfac.blocks.Block`. "
                f"Received: block={block!r}"
            )
        missing = sorted(getattr(block, "__abstractmethods__", ()))
        missing += [] if hasattr(block, "kind") else ["kind"]
        if missing:
            raise TypeError(
                "Argument `block` must define all attributes of a block. "
                f"Received: block={block!r}, which lacks {', '.join(missing)}"
            )
        types: BlockTypes | None = {"": block}
    else:
        types = _types_of_class(like) if isinstance(like, type) else None
    if types is None:
        names = [c.__name__ for c in (*BLOCKS, *_registered)]
        raise ValueError(
            "Argument `like` must be a layer class with a block: one of "
            f"{', '.join(names)}. Received: like={like!r}"
        )
    _registered[layer_class] = types


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
