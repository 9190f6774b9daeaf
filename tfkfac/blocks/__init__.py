"""Curvature blocks: what the factors A and G of a layer type are.

A new layer type is one file here and one line in `BLOCKS`.
"""

import keras

from tfkfac.blocks.base import Block
from tfkfac.blocks.conv import (
    ConvBlock,
    DepthwiseConvBlock,
    SeparableDepthwiseBlock,
    SeparablePointwiseBlock,
)
from tfkfac.blocks.dense import DenseBlock
from tfkfac.blocks.einsum_dense import EinsumDenseBlock
from tfkfac.blocks.embedding import EmbeddingBlock
from tfkfac.blocks.gradient import LayerGradient
from tfkfac.blocks.normalization import NormalizationBlock
from tfkfac.blocks.rows import Rows, Statistic

# The blocks of a layer type, by the prefix that tells them apart.
_SEPARABLE: dict[str, type[Block]] = {
    "depthwise/": SeparableDepthwiseBlock,
    "pointwise/": SeparablePointwiseBlock,
}
BLOCKS: dict[type[keras.layers.Layer], dict[str, type[Block]]] = {
    keras.layers.Dense: {"": DenseBlock},
    keras.layers.Conv1D: {"": ConvBlock},
    keras.layers.Conv2D: {"": ConvBlock},
    keras.layers.Conv3D: {"": ConvBlock},
    keras.layers.DepthwiseConv1D: {"": DepthwiseConvBlock},
    keras.layers.DepthwiseConv2D: {"": DepthwiseConvBlock},
    keras.layers.SeparableConv1D: _SEPARABLE,
    keras.layers.SeparableConv2D: _SEPARABLE,
    keras.layers.EinsumDense: {"": EinsumDenseBlock},
    keras.layers.Embedding: {"": EmbeddingBlock},
    keras.layers.BatchNormalization: {"": NormalizationBlock},
    keras.layers.LayerNormalization: {"": NormalizationBlock},
    keras.layers.GroupNormalization: {"": NormalizationBlock},
    keras.layers.RMSNormalization: {"": NormalizationBlock},
}


def block_types(layer: keras.layers.Layer) -> dict[str, type[Block]]:
    """Returns the blocks for a layer by prefix; empty if there are none.

    A subclass of a supported layer counts as that layer only if it has not
    changed `call`: what else it computes is not known.
    """
    for supported, types in BLOCKS.items():
        if isinstance(layer, supported):
            same = type(layer).call is supported.call
            return types if same else {}
    return {}


__all__ = [
    "BLOCKS",
    "Block",
    "LayerGradient",
    "Rows",
    "Statistic",
    "block_types",
]
