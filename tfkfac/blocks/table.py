"""Which blocks a layer type has, and the register of the user's own."""

from typing import Any

import keras

from tfkfac.blocks.base import Block
from tfkfac.blocks.conv import (
    ConvBlock,
    DepthwiseConvBlock,
    SeparableDepthwiseBlock,
    SeparablePointwiseBlock,
)
from tfkfac.blocks.conv_transpose import (
    ConvTransposeBiasBlock,
    ConvTransposeBlock,
)
from tfkfac.blocks.dense import DenseBlock
from tfkfac.blocks.einsum_dense import EinsumDenseBlock
from tfkfac.blocks.embedding import (
    EmbeddingBlock,
    PositionEmbeddingBlock,
    ProjectionBlock,
    ReversibleEmbeddingBlock,
)
from tfkfac.blocks.normalization import (
    NormalizationBlock,
    ShiftedNormalizationBlock,
)
from tfkfac.blocks.prelu import PReLUBlock

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
# The same for layers of packages that need not be there, by package and name.
NAMED_BLOCKS: dict[tuple[str, str], BlockTypes] = {
    ("keras_hub", "PositionEmbedding"): {"": PositionEmbeddingBlock},
}
# Keras-hub's normalisations: RMS of the last axis, and a scale alone.
for _name in (
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
):
    NAMED_BLOCKS["keras_hub", _name] = {"": ShiftedNormalizationBlock}
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
