"""Block of `keras.layers.Dense`."""

from collections.abc import Hashable

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import Alike
from tfkfac.blocks.matrix import MatrixBlock
from tfkfac.blocks.rows import Rows, fold_mask, fold_positions
from tfkfac.capture.record import Record


class DenseBlock(MatrixBlock):
    """`z = a W + b` at every position of an input of rank 2 or more."""

    kind = "Dense"
    examples_first = True

    @override
    def alike(self, record: Record) -> Alike | None:
        return self.plainly_alike(record)

    @property
    @override
    def form(self) -> Hashable:
        return type(self), self.dtype, len(self.variables)

    @override
    def rows(self, record: Record) -> Rows:
        inputs = record.inputs
        if isinstance(inputs, tf.SparseTensor):
            inputs = tf.sparse.to_dense(inputs)
        mask = record.mask
        if mask is not None:
            mask = fold_mask(mask, tf.shape(inputs)[:-1])
        return Rows(
            self.with_bias(fold_positions(self.cast(inputs))),
            fold_positions(self.cast(record.gradient)),
            mask,
        )
