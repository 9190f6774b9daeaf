"""Curvature blocks: what the factors A and G of a layer type are.

`tfkfac.register_block` gives a block to a layer class of one's own. A block is
a subclass of one of these:

- `PerExampleBlock`: a few weights, by the gradient of each example,
- `MatrixBlock`: a kernel that is a matrix, by inputs and gradients as `Rows`,
- `Block`: anything else; the kinds of factors are in `tfkfac.factors`.

A new layer type of the library is one file here and one line in the table.
"""

from tfkfac.blocks.base import Block, MatrixBlock, PerExampleBlock
from tfkfac.blocks.registry import BLOCKS, block_types, register_block
from tfkfac.blocks.rows import (
    LayerGradient,
    MatrixGradient,
    RowGradient,
    Rows,
    Statistic,
    fold_mask,
    fold_positions,
)
from tfkfac.capture.taps import Record

__all__ = [
    "BLOCKS",
    "Block",
    "LayerGradient",
    "MatrixBlock",
    "MatrixGradient",
    "PerExampleBlock",
    "Record",
    "RowGradient",
    "Rows",
    "Statistic",
    "block_types",
    "fold_mask",
    "fold_positions",
    "register_block",
]
