"""The table of blocks by layer type, and the blocks of a model."""

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
from tfkfac.capture.walk import Node, SkipRule, unbuilt, walk
from tfkfac.factors import Limit


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Trainable variables of a layer without a block, and the reason."""

    path: str
    variables: tuple[keras.Variable, ...]
    reason: str

    @property
    def weights(self) -> int:
        """Number of weights."""
        return count_weights(self.variables)


@dataclasses.dataclass(frozen=True)
class Registry:
    """Blocks of a model, and its variables without one."""

    blocks: tuple[Block, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def left(self) -> tuple[Leftover, ...]:
        """The leftovers, and the blocks that took no part in the last step."""
        idle = [
            Leftover(block.path, tuple(block.variables), block.left_out)
            for block in self.blocks
            if block.left_out is not None
        ]
        return (*self.leftovers, *idle)

    @property
    def covered(self) -> int:
        """Number of weights that are preconditioned."""
        active = [b for b in self.blocks if b.left_out is None]
        return sum(count_weights(block.variables) for block in active)

    def agreement(self) -> dict[str, Any]:
        """The part that all workers must have in common, as for JSON."""
        layers = [
            [block.path, block.kind, [f.text for f in block.factors.values()]]
            for block in self.blocks
        ]
        rest = [[left.path, left.reason] for left in self.leftovers]
        return {"layers": layers, "layers left to the inner optimizer": rest}


def tap_layers(
    model: keras.Model,
    skip_layers: Sequence[SkipRule],
    owner: object,
    without: tuple[type[Block], ...] = (),
) -> None:
    """Taps the layers for an owner, and again when more have been built.

    Those of blocks `without` which the owner does are not.
    """
    for node in walk(model, skip_layers):
        types = block_types(node.layer).values()
        supported = not all(issubclass(kind, without) for kind in types)
        if node.reason is None and node.layer.trainable and supported:
            Tap.open(node.tapped, owner)
    again = functools.partial(tap_layers, model, skip_layers, owner, without)
    for layer in unbuilt(model):
        if not block_types(layer):
            before_first_call(layer, again)


def build_registry(
    model: keras.Model,
    skip_layers: Sequence[SkipRule],
    limit: Limit = Block.limit,
    without: tuple[type[Block], ...] = (),
) -> Registry:
    """Gives each layer of a built model its blocks, in the order of layers.

    Factors are kept whole up to the limit. Blocks of some classes may be left
    out.
    """
    free = {id(v): v for v in model.trainable_variables}
    blocks: list[Block] = []
    leftovers: list[Leftover] = []
    for node in walk(model, skip_layers):
        layer, reason = node.layer, node.reason
        new: list[Block] = []
        if reason is None and layer.built and layer.trainable:
            new, reason = _blocks_of(node, free, limit, without)
            blocks += new
        rest = [v for v in layer.trainable_variables if id(v) in free]
        for variable in rest:
            del free[id(variable)]
        if rest:
            missing = "not in the block of" if new else "no block for"
            reason = reason or f"{missing} {type(layer).__name__}"
            leftovers.append(Leftover(node.path, tuple(rest), reason))
    return Registry(tuple(blocks), tuple(leftovers))


def _blocks_of(
    node: Node,
    free: dict[int, keras.Variable],
    limit: Limit,
    without: tuple[type[Block], ...],
) -> tuple[list[Block], str | None]:
    """Makes a layer's blocks and takes their weights out of `free`.

    They come with the reason if there could have been more.

    Raises:
        ValueError: If the layer, of a registered class, has not what it needs.
    """
    blocks: list[Block] = []
    outer = node.distributor
    for prefix, kind in block_types(node.layer).items():
        if issubclass(kind, without):
            return blocks, f"steps of this kind leave out {kind.kind}"
        reason = kind.unsupported(node.layer)
        if outer is not None:
            reason = reason or TimeDistributedBlock.unsupported(outer)
        if reason is not None:
            return blocks, reason
        parent, slash, name = node.path.rpartition("/")
        path = f"{parent}{slash}{prefix}{name}"
        try:
            block = kind(node.layer, path)
        except AttributeError as error:
            raise ValueError(
                f"Layer '{path}' has not all that its block, {kind.__name__}, "
                f"needs: {error}. See `tfkfac.register_block`."
            ) from error
        block.limit = limit
        if not block.variables:
            continue
        if outer is not None:
            block = TimeDistributedBlock(outer, block)
        reason = _why_not(block, free, limit)
        if reason is not None:
            return blocks, reason
        blocks.append(block)
        for variable in block.variables:
            del free[id(variable)]
    return blocks, None


def _why_not(
    block: Block, free: dict[int, keras.Variable], limit: Limit
) -> str | None:
    """Why a block cannot be used, or None."""
    if not all(id(v) in free for v in block.variables):
        return "kernel frozen or shared with another layer"
    for name, factor in block.factors.items():
        # Only of a block that does not ask the limit.
        if limit.exceeded(factor.whole_size):
            return (
                f"factor {name} of {factor.text} exceeds "
                f"max_factor_dim={limit.size}"
            )
    return None


def count_weights(variables: Sequence[keras.Variable]) -> int:
    """Number of elements of some variables."""
    return sum(math.prod(variable.shape) for variable in variables)


# The blocks of a layer type, by the prefix that tells them apart.
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
# Keras-hub's normalisations: RMS of the last axis, and a scale alone.
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
# The same for layers of packages that need not be there, by package and name.
NAMED_BLOCKS: dict[tuple[str, str], BlockTypes] = {
    ("keras_hub", "PositionEmbedding"): {"": PositionEmbeddingBlock},
    **{
        ("keras_hub", name): {"": ShiftedNormalizationBlock}
        for name in _RMS_OF_KERAS_HUB
    },
}
# Classes that users have registered; they go before those above.
_registered: dict[type[keras.layers.Layer], BlockTypes] = {}


def block_types(layer: keras.layers.Layer) -> BlockTypes:
    """Returns the blocks for a layer by prefix; empty if there are none.

    A subclass of a known class counts as that class only if it has not
    changed `call`: what else it computes is not known.

    Args:
        layer: The layer.
    """
    for base in type(layer).__mro__:
        types = _types_of_class(base)
        if types is not None:
            same = type(layer).call is getattr(base, "call", None)
            return types if same else {}
    return {}


def _types_of_class(layer_class: type) -> BlockTypes | None:
    """The blocks of a class itself, its bases not considered."""
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
    """Makes `KFAC` precondition the layers of a class.

    K-FAC has no block for a class that it does not know, nor for a subclass
    with a `call` of its own, as it cannot tell what they compute. Either say
    that they compute the same as the layers of another class, from the same
    attributes. Those of `keras.layers.Dense` are `kernel`, and `bias` and
    `activation` if there are any:

    >>> tfkfac.register_block(MyDense, like=keras.layers.Dense)

    Or write a block. `tfkfac.blocks` has three classes to start from:
    `PerExampleBlock` for a few weights without a kernel, `MatrixBlock` for a
    kernel that is a matrix, and `Block` for all else. For example:

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

    It counts for models that are compiled, or attached, from then on; a model
    that is built keeps the blocks that it has until it is compiled again.
    Registered classes go before the built-in ones, and the last registration
    of a class counts. A subclass of a registered class is covered too, unless
    it has a `call` of its own.

    Args:
        layer_class: The layer class.
        like: A layer class that has blocks, built-in or registered.
        block: A subclass of `tfkfac.blocks.Block`.

    Raises:
        TypeError: If `layer_class` is no layer class, or `block` no class of
            blocks.
        ValueError: If both or neither of `like` and `block` are given, or if
            `like` has no blocks.
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
    if block is None:
        _registered[layer_class] = _types_like(like)
    else:
        _registered[layer_class] = {"": _check_block(block)}


def _types_like(like: Any) -> BlockTypes:
    """The blocks of a class that a user says another one is like."""
    types = _types_of_class(like) if isinstance(like, type) else None
    if types is None:
        known = [c.__name__ for c in (*BLOCKS, *_registered)]
        raise ValueError(
            "Argument `like` must be a layer class that has blocks: one of "
            f"{', '.join(known)}. Received: like={like!r}"
        )
    return types


def _check_block(block: Any) -> type[Block]:
    if not _is_class(block, Block):
        raise TypeError(
            "Argument `block` must be a subclass of `tfkfac.blocks.Block`. "
            f"Received: block={block!r}"
        )
    missing = sorted(getattr(block, "__abstractmethods__", ()))
    missing += [] if hasattr(block, "kind") else ["kind"]
    if missing:
        raise TypeError(
            "Argument `block` must be a class with all that a block has. "
            f"Received: block={block!r}, which lacks {', '.join(missing)}"
        )
    return block


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
