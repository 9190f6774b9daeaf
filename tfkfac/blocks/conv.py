"""Blocks of convolutions and transposed convolutions in 1 to 3 dimensions."""

import math
from collections.abc import Callable

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import MatrixBlock, PerExampleBlock
from tfkfac.blocks.correlation import channel_grams, costs, patch_gram
from tfkfac.blocks.patches import Geometry, Patches
from tfkfac.blocks.rows import Rows, Statistic, fold_positions
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import TraceKey, shared_call
from tfkfac.factors import Dense
from tfkfac.linalg.tensors import size_of


class ConvBlock(MatrixBlock):
    """Convolution as a dense layer on patches (Grosse & Martens, 2016).

    Patch elements have the order of the Keras kernel, `(kernel size...,
    channels)`. Patches include the zeros of the padding. A grouped
    convolution has a pair of factors for each group.
    """

    kind = "Conv"
    examples_first = True

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        groups = getattr(layer, "groups", 1)  # a depthwise layer has no groups
        self.groups = groups if groups > 1 else 0

    def _output_size(self) -> int:
        return self._kernel.shape[-1] // (self.groups or 1)

    @property
    def _is_pointwise(self) -> bool:
        """True for a kernel of size 1 and stride 1: patches equal pixels."""
        layer = self.layer
        is_plain = layer.data_format == "channels_last" and not self.groups
        return is_plain and max(*layer.kernel_size, *layer.strides) == 1

    @override
    def trace_key(self, record: Record) -> TraceKey | None:
        if self._is_pointwise:
            return self.dense_trace_key(record)
        key = (
            type(self),
            self.dtype,
            len(self.variables),
            tuple(self.factors.items()),
            _geometry(self.layer),
            self.layer.data_format,
        )
        return TraceKey(key, any_size=False)

    @override
    def rows(self, record: Record) -> Rows:
        inputs = record.inputs
        g = self._gradients(channels_last(self.layer, record.gradient))
        if self.groups:
            width = g.shape[-1] // self.groups
            # `tf.reshape` infers the batch size only if no other size is 0.
            batch = -1 if g.shape[1] else size_of(g, 0)
            g = tf.reshape(g, [batch, size_of(g, 1), self.groups, width])

        def patches() -> tf.Tensor | Patches:
            if self._is_pointwise:
                return self.with_bias(fold_positions(self.cast(inputs)))
            return Patches(
                channels_last(self.layer, inputs),
                _geometry(self.layer),
                self.dtype,
                self.groups,
                bool(self._bias),
            )

        gram, rank = None, len(self.layer.kernel_size)
        is_image = rank < 3 and max(self.layer.dilation_rate) == 1
        if is_image and isinstance(self.factors["A"], Dense):
            images = channels_last(self.layer, self.cast(inputs))
            # A sequence is an image of height 1.
            gram = self._gram_of(images if rank == 2 else images[:, None])
        return Rows(patches, g, None, gram)

    def _gradients(self, gradient: tf.Tensor) -> tf.Tensor:
        return fold_positions(self.cast(gradient))

    def _gram_of(self, images: tf.Tensor) -> Callable[[], Statistic] | None:
        """Return a function that computes A without patches, or None."""
        geometry, bias = _image_geometry(self.layer), bool(self._bias)
        # A kernel of size 1 needs no patches.
        if self.groups or max(geometry.size) == 1:
            return None
        by_correlation, by_patches = costs(images.shape, geometry)
        if by_correlation >= by_patches:
            return None
        return lambda: shared_call(
            ("correlation", geometry, bias),
            lambda images: patch_gram(images, geometry, bias),
            images,
            placed=True,
        )


class DepthwiseConvBlock(ConvBlock):
    """Depthwise convolution: a pair of small factors for each channel."""

    kind = "DepthwiseConv"

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        self.groups = self._kernel.shape[-2]

    def _output_size(self) -> int:
        return self._kernel.shape[-1]

    def _gram_of(self, images: tf.Tensor) -> Callable[[], Statistic] | None:
        geometry = _image_geometry(self.layer)
        if max(geometry.strides) > 1:  # space-to-depth would mix channels
            return None
        return lambda: channel_grams(images, geometry, bool(self._bias))


class SeparableDepthwiseBlock(DepthwiseConvBlock):
    """Depthwise kernel of a separable convolution; it has no bias."""

    kind = "SeparableConv, depthwise"
    _kernel_name = "depthwise_kernel"
    _covers_bias = False

    @override
    def trace_key(self, record: Record) -> None:
        return None  # the statistics depend on the pointwise kernel

    @override
    def _gradients(self, gradient: tf.Tensor) -> tf.Tensor:
        # Backpropagate through the pointwise convolution.
        pointwise = self.layer.pointwise_kernel
        pointwise = tf.reshape(pointwise, [-1, pointwise.shape[-1]])
        return tf.matmul(
            super()._gradients(gradient), self.cast(pointwise), transpose_b=True
        )


class SeparablePointwiseBlock(MatrixBlock):
    """Pointwise kernel of a separable convolution, with the bias."""

    kind = "SeparableConv, pointwise"
    examples_first = True
    _kernel_name = "pointwise_kernel"

    @override
    def rows(self, record: Record) -> Rows:
        layer = self.layer
        # Recompute the depthwise output, the input of the pointwise kernel.
        inputs = keras.ops.depthwise_conv(
            channels_last(layer, self.cast(record.inputs)),
            self.cast(layer.depthwise_kernel),
            layer.strides,
            layer.padding,
            "channels_last",
            layer.dilation_rate,
        )
        a = fold_positions(inputs)
        gradient = channels_last(self.layer, self.cast(record.gradient))
        return Rows(self.with_bias(a), fold_positions(gradient), None)


def _geometry(layer: keras.layers.Layer) -> Geometry:
    size, strides, rates = map(
        tuple, (layer.kernel_size, layer.strides, layer.dilation_rate)
    )
    return Geometry(size, strides, layer.padding, rates)


def _image_geometry(layer: keras.layers.Layer) -> Geometry:
    """Two-dimensional geometry of a layer of 1 or 2 spatial dimensions."""
    ones = (1,) * (2 - len(layer.kernel_size))
    size, strides = (*ones, *layer.kernel_size), (*ones, *layer.strides)
    return Geometry(size, strides, layer.padding)


def channels_last(layer: keras.layers.Layer, tensor: tf.Tensor) -> tf.Tensor:
    """Transpose the image of a channels-first layer to channels last."""
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])


class ConvTransposeBlock(MatrixBlock):
    """Kernel of a transposed convolution, without the bias.

    The layer is the input gradient of a convolution, so inputs and patches
    exchange their roles (Grosse & Martens, 2016). At each input position `s`,
    a dense layer maps the channels `a_s` to a patch of the output:

        dL/dW[k, o, i] = sum_s patch_s(g)[k, o] a_s[i].

    The alternative, patches of the zero-interleaved input, gives the same
    gradient, but A would mix rows of different strides. The bias has a separate
    block, because it is added at output positions.
    """

    kind = "ConvTranspose"
    examples_first = True
    _covers_bias = False

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
        gradient = channels_last(self.layer, record.gradient)
        patches = Patches(gradient, _geometry(self.layer), self.dtype)
        return Rows(fold_positions(inputs), patches, None)


class ConvTransposeBiasBlock(PerExampleBlock):
    """Exact Fisher matrix of the bias of a transposed convolution."""

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
