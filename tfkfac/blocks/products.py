"""Products of an image's cells, of all channels or of each with itself.

The filter gradient of a convolution is such a sum of products.
"""

import abc
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.patches import extract_patches
from tfkfac.blocks.rows import size_of

_ONES = (1, 1)


class Products(abc.ABC):
    """Sums of the products of cells, over positions and examples."""

    @abc.abstractmethod
    def at_shifts(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        """Products of an image with itself, `sum x[u] x[u + d]`.

        Args:
            images: `(batch, height, width, channels)`, zero outside.
            size: Above the absolute values of the shifts `d`, down and right.

        Returns:
            `(2 down - 1, 2 right - 1, ...)`, a negative shift first.
        """

    @abc.abstractmethod
    def of_patches(
        self, images: tf.Tensor, size: Sequence[int], stride: int = 1
    ) -> tf.Tensor:
        """Products of all pairs of offsets of a kernel.

        Args:
            images: `(batch, height, width, channels)`.
            size: Height and width of the kernel.
            stride: Stride in both dimensions.

        Returns:
            `(height, width, height, width, ...)`.
        """

    @abc.abstractmethod
    def as_factor(self, products: tf.Tensor) -> tf.Tensor:
        """What `of_patches` returns as a matrix, or a stack of them."""

    @abc.abstractmethod
    def as_row(self, sums: tf.Tensor) -> tf.Tensor:
        """A sum of patches `(height, width, channels)` in the same order."""


class AllChannels(Products):
    """Products of all pairs of channels, in two more dimensions."""

    @override
    def at_shifts(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        (down, right), channels = size, images.shape[-1]
        paddings = [[0, 0], [0, down - 1], [right - 1, right - 1], [0, 0]]
        half = tf.raw_ops.Conv2DBackpropFilter(
            input=tf.pad(images, paddings),
            filter_sizes=[down, 2 * right - 1, channels, channels],
            out_backprop=images,
            strides=[1] * 4,
            padding="VALID",  # oneDNN has none of explicit paddings
        )  # The cell that is shifted comes first.
        opposite = tf.reverse(half[1:], [0, 1])
        return tf.concat([opposite, tf.transpose(half, [0, 1, 3, 2])], 0)

    @override
    def of_patches(
        self, images: tf.Tensor, size: Sequence[int], stride: int = 1
    ) -> tf.Tensor:
        slices = extract_patches(images, size, (stride, stride), _ONES, "valid")
        rows = tf.concat(slices, -1)
        rows = tf.reshape(rows, [-1, rows.shape[-1]])
        gram = tf.matmul(rows, rows, transpose_a=True)
        gram = tf.reshape(gram, [*size, images.shape[-1]] * 2)
        return tf.transpose(gram, [0, 1, 3, 4, 2, 5])

    @override
    def as_factor(self, products: tf.Tensor) -> tf.Tensor:
        high, wide, *_, channels = products.shape
        offsets, elements = high * wide, high * wide * channels
        products = tf.reshape(products, [offsets, offsets, channels, channels])
        products = tf.transpose(products, [0, 2, 1, 3])
        return tf.reshape(products, [elements, elements])

    @override
    def as_row(self, sums: tf.Tensor) -> tf.Tensor:
        return tf.reshape(sums, [-1])


class EachChannel(Products):
    """Products of each channel with itself, in one more dimension."""

    @override
    def at_shifts(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        down, right = size
        paddings = [[0, 0], [0, down - 1], [right - 1, right - 1], [0, 0]]
        padded = tf.pad(images, paddings)
        half = self._gradients(padded, (down, 2 * right - 1), [images], 1)[0]
        return tf.concat([tf.reverse(half[1:], [0, 1]), half], 0)[..., 0]

    @override
    def of_patches(
        self, images: tf.Tensor, size: Sequence[int], stride: int = 1
    ) -> tf.Tensor:
        slices = extract_patches(images, size, (stride, stride), _ONES, "valid")
        rows = self._gradients(images, size, slices, stride)
        return tf.reshape(tf.stack(rows), [*size, *size, -1])

    def _gradients(
        self,
        images: tf.Tensor,
        size: Sequence[int],
        outputs: Sequence[tf.Tensor],
        stride: int,
    ) -> list[tf.Tensor]:
        """Products of each output with what the kernel sees there.

        They are `(height, width, channels, 1)`.
        """
        sizes = tf.convert_to_tensor([*size, size_of(images, -1), 1])
        return [
            tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                input=images,
                filter_sizes=sizes,
                out_backprop=one,
                strides=[1, stride, stride, 1],
                padding="VALID",
            )
            for one in outputs
        ]

    @override
    def as_factor(self, products: tf.Tensor) -> tf.Tensor:
        high, wide, *_ = products.shape
        offsets = high * wide
        products = tf.reshape(products, [offsets, offsets, -1])
        return tf.transpose(products, [2, 0, 1])

    @override
    def as_row(self, sums: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.reshape(sums, [-1, size_of(sums, -1)]))
