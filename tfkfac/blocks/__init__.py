"""Curvature blocks: the Kronecker factors A and G of each layer type.

`tfkfac.register_block` assigns a block to a custom layer class. Subclass one
of these classes to write a block:

- `PerExampleBlock`: a few weights with a gradient per example,
- `MatrixBlock`: a matrix-shaped kernel with inputs and gradients as `Rows`,
- `Block`: any other layer; `tfkfac.factors` has the factor types.

To add a layer type to the library, add a file to this folder and an entry to
`BLOCKS` in `registry.py`.
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
