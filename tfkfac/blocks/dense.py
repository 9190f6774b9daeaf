"""Blocks of `Dense` and `EinsumDense`, including attention projections."""

import dataclasses
import math
import string
from collections.abc import Sequence

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import MatrixBlock
from tfkfac.blocks.rows import Rows, fold_mask, fold_positions
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import TraceKey


class DenseBlock(MatrixBlock):
    """Dense layer `z = a W + b`, applied at each position of its input."""

    kind = "Dense"
    examples_first = True

    @override
    def trace_key(self, record: Record) -> TraceKey | None:
        return self.dense_trace_key(record)

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


@dataclasses.dataclass(frozen=True)
class Labels:
    """Axis labels of an einsum equation `inputs,kernel->outputs`, by role."""

    inputs: str
    kernel: str
    outputs: str

    @classmethod
    def parse(cls, layer: keras.layers.EinsumDense) -> "Labels":
        """Parse the equation of a layer and expand its ellipsis."""
        equation = layer.equation.replace(" ", "")
        unused = [c for c in string.ascii_uppercase if c not in equation]
        input_labels = equation.split(",")[0].replace("...", "")
        ellipsis = "".join(unused[: layer.input_spec.ndim - len(input_labels)])
        operands, outputs = equation.replace("...", ellipsis).split("->")
        inputs, kernel = operands.split(",")
        return cls(inputs, kernel, outputs)

    @property
    def shared(self) -> str:
        """Batch and position axes: in input and output, not in the kernel."""
        return _select(self.inputs, self.outputs, self.kernel)

    @property
    def groups(self) -> str:
        """Group axes: in input, kernel and output."""
        return _select(self.kernel, _select(self.inputs, self.outputs))

    @property
    def contracted(self) -> str:
        """Input feature axes, in the order of the kernel."""
        return _select(self.kernel, self.inputs, self.outputs)

    @property
    def features(self) -> str:
        """Output feature axes, in the order of the kernel."""
        return _select(self.kernel, self.outputs, self.inputs)


def _select(labels: str, within: str, excluded: str = "") -> str:
    """Select the labels that are in `within` and not in `excluded`."""
    return "".join(c for c in labels if c in within and c not in excluded)


class EinsumDenseBlock(MatrixBlock):
    """Einsum contraction as a dense layer, or as a dense layer per group.

    The role of an axis depends on the operands that have its label:

    | input | kernel | output | role                       |
    |-------|--------|--------|----------------------------|
    | x     | x      |        | input features             |
    |       | x      | x      | output features            |
    | x     |        | x      | batch and shared positions |
    | x     | x      | x      | groups                     |
    """

    kind = "EinsumDense"

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        self._labels = labels = Labels.parse(layer)
        self.examples_first = labels.outputs.startswith(labels.inputs[0])
        sizes = dict(zip(labels.kernel, self._kernel.shape, strict=True))
        self._axis_sizes = sizes
        if labels.groups:
            self.groups = self._axes_size(labels.groups)
        # Permutation of the kernel axes to (groups, inputs, outputs).
        order = labels.groups + labels.contracted + labels.features
        self._kernel_order = [labels.kernel.index(c) for c in order]
        # Shape of the bias, and permutation of its axes to (groups, outputs).
        order = labels.groups + labels.features
        bias = _select(labels.outputs, order)
        self._bias_shape = [sizes[c] for c in bias]
        self._bias_order = [bias.index(c) for c in order]

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        labels = Labels.parse(layer)
        features = labels.groups + labels.contracted + labels.features
        if set(features) != set(labels.kernel) or labels.inputs[0] in features:
            return f"einsum equation {layer.equation!r}"
        if set(labels.inputs) - set(labels.shared + features):
            return f"einsum equation {layer.equation!r}"
        bias = {c for c in layer.bias_axes or "" if c != "."}
        if bias and bias != set(labels.groups + labels.features):
            return f"bias over the axes {layer.bias_axes!r}"
        return MatrixBlock.unsupported(layer)

    def _axes_size(self, labels: str) -> int:
        return math.prod(self._axis_sizes[c] for c in labels)

    def _output_size(self) -> int:
        return self._axes_size(self._labels.features)

    def _split(self, kernel: tf.Tensor) -> tf.Tensor:
        kernel = tf.transpose(kernel, self._kernel_order)
        return tf.reshape(kernel, self.matrix_shape)

    def _join(self, matrix: tf.Tensor) -> tf.Tensor:
        order = self._kernel_order
        shape = [self._kernel.shape[i] for i in order]
        return tf.transpose(tf.reshape(matrix, shape), invert(order))

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        kernel, *bias = gradients
        if bias:
            squeezed = tf.reshape(bias[0], self._bias_shape)
            bias = [tf.transpose(squeezed, self._bias_order)]
        return super().to_matrix([kernel, *bias])

    def _join_bias(self, row: tf.Tensor) -> tf.Tensor:
        order, shape = self._bias_order, self._bias_shape
        bias = tf.reshape(row, [shape[i] for i in order])
        return super()._join_bias(tf.transpose(bias, invert(order)))

    @override
    def rows(self, record: Record) -> Rows:
        labels = self._labels
        a = self._fold(
            self.cast(record.inputs), labels.inputs, labels.contracted
        )
        g = self._fold(
            self.cast(record.gradient), labels.outputs, labels.features
        )
        mask = None
        # Ignore a mask whose axes are not batch and position axes.
        rank = 0 if record.mask is None else record.mask.shape.rank
        if rank and labels.inputs.startswith(labels.shared[:rank]):
            shape = tf.shape(record.inputs)
            axes = [labels.inputs.index(c) for c in labels.shared]
            mask = fold_mask(record.mask, tf.gather(shape, axes))
        return Rows(self.with_bias(a), g, mask)

    def _fold(self, tensor: tf.Tensor, labels: str, features: str) -> tf.Tensor:
        """Transpose and reshape to `(batch, shared, [groups,] features)`."""
        shared, groups = self._labels.shared, self._labels.groups
        order = [labels.index(c) for c in shared + groups + features]
        tensor = tf.transpose(tensor, order)
        shape = tf.shape(tensor)
        positions = tf.reduce_prod(shape[1 : len(shared)])
        sizes = [self._axes_size(groups)] if groups else []
        sizes.append(self._axes_size(features))
        return tf.reshape(tensor, [shape[0], positions, *sizes])


def invert(order: Sequence[int]) -> list[int]:
    """Invert a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)
