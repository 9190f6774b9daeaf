"""Blocks of transposed convolutions of one to three dimensions."""

import math

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.conv import channels_last, conv_slices
from tfkfac.blocks.matrix import MatrixBlock
from tfkfac.blocks.per_example import PerExampleBlock
from tfkfac.blocks.rows import Rows, fold_positions
from tfkfac.capture.record import Record


class ConvTransposeBlock(MatrixBlock):
    """Kernel of a transposed convolution: a convolution from back to front.

    The layer is the gradient of a convolution in its input, so the roles are
    swapped (Grosse & Martens, 2016): each input position `s` is a dense layer
    from its channels `a_s` to the patch of the output that it adds to. The
    gradient in that patch is the patch of the output's gradient,

        dL/dW[k, o, i] = sum_s patch_s(g)[k, o] a_s[i],

    so A has the size of the input channels and G that of `(kernel size...,
    output channels)`. With a single position, or patches that do not touch
    (strides no smaller than the kernel), this is a dense layer's block.
    The other way to see it, patches of an input with zeros between its cells,
    gives the same gradient, but mixes rows of different strides in one A.

    The bias is added at output positions, which are others: it has a block of
    its own.
    """

    kind = "ConvTranspose"
    examples_first = True

    def _find_bias(self) -> keras.Variable | None:
        return None

    def _output_size(self) -> int:
        return math.prod(self._kernel.shape[:-1])

    def _split(self, kernel: tf.Tensor) -> tf.Tensor:
        inputs, outputs = self.matrix_shape
        return tf.transpose(tf.reshape(kernel, [outputs, inputs]))

    def _join(self, matrix: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.transpose(matrix), self._kernel.shape)

    @override
    def rows(self, record: Record) -> Rows:
        inputs = channels_last(self.layer, self.cast(record.inputs))
        patches = conv_slices(self.layer, self.cast(record.gradient))
        return Rows(
            fold_positions(inputs),
            fold_positions(tf.concat(patches, -1)),
            None,
        )


class ConvTransposeBiasBlock(PerExampleBlock):
    """Bias of a transposed convolution: its Fisher matrix, exact."""

    kind = "ConvTranspose, bias"
    examples_first = True

    @property
    @override
    def variables(self) -> list[keras.Variable]:
        bias = self.layer.bias
        return [bias] if bias is not None and bias.trainable else []

    @override
    def example_gradients(self, record: Record) -> list[tf.Tensor]:
        gradient = channels_last(self.layer, self.cast(record.gradient))
        return [tf.reduce_sum(fold_positions(gradient), 1)]
