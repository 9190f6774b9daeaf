"""Sum of the outer products of patches by correlation.

`patch_gram` computes the sum of `p p^T` over patches `p` without patches:

1. Take patches at all positions that overlap the image. The product of two
   kernel offsets then depends on their difference only. It is the
   autocorrelation of the image at this shift. One filter gradient computes
   the autocorrelation for all shifts.
2. Subtract the products at positions beyond the outputs, edge by edge.

A space-to-depth reshape turns a strided convolution into a convolution of
stride 1 with a smaller kernel.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.patches import Geometry, fit_axis, maximum
from tfkfac.blocks.rows import Statistic
from tfkfac.compat.functions import shared_call
from tfkfac.linalg.tensors import size_of


class AllChannelPairs:
    """Sums of products of all pairs of channels, over positions and examples.

    Results end with the axes `(channels, channels)`.
    """

    def correlation(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        """Autocorrelation `sum_u x[u] x[u + d]` for shifts `|d| < size`.

        The result is `(2 height - 1, 2 width - 1, ...)`, negative shifts first.
        """
        (height, width), channels = size, images.shape[-1]
        paddings = [[0, 0], [0, height - 1], [width - 1, width - 1], [0, 0]]
        # Vertical shifts d >= 0; axis 2 is the channel of the shifted image.
        down = tf.raw_ops.Conv2DBackpropFilter(
            input=tf.pad(images, paddings),
            filter_sizes=[height, 2 * width - 1, channels, channels],
            out_backprop=images,
            strides=[1] * 4,
            padding="VALID",  # oneDNN does not support explicit padding.
        )
        up = tf.reverse(down[1:], [0, 1])
        return tf.concat([up, tf.transpose(down, [0, 1, 3, 2])], 0)

    def patch_products(
        self, images: tf.Tensor, size: Sequence[int]
    ) -> tf.Tensor:
        """Sum of `p_i p_j` over patches p, for all kernel offsets i and j.

        The result has shape `(height, width, height, width, ...)`.
        """
        rows = tf.concat(_slices(images, size), -1)
        rows = tf.reshape(rows, [-1, rows.shape[-1]])
        gram = tf.matmul(rows, rows, transpose_a=True)
        gram = tf.reshape(gram, [*size, images.shape[-1]] * 2)
        return tf.transpose(gram, [0, 1, 3, 4, 2, 5])

    def as_factor(self, products: tf.Tensor) -> tf.Tensor:
        """Reshape the result of `patch_products` to a matrix or a stack."""
        height, width, *_, channels = products.shape
        offsets, elements = height * width, height * width * channels
        products = tf.reshape(products, [offsets, offsets, channels, channels])
        products = tf.transpose(products, [0, 2, 1, 3])
        return tf.reshape(products, [elements, elements])

    def as_row(self, sums: tf.Tensor) -> tf.Tensor:
        """Flatten a patch `(height, width, channels)` in factor order."""
        return tf.reshape(sums, [-1])


class SameChannelPairs(AllChannelPairs):
    """Sums of products of each channel with itself, `(..., channels)`."""

    @override
    def correlation(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        height, width = size
        paddings = [[0, 0], [0, height - 1], [width - 1, width - 1], [0, 0]]
        padded = tf.pad(images, paddings)
        size = (height, 2 * width - 1)
        down = self._filter_gradients(padded, size, [images])[0]
        return tf.concat([tf.reverse(down[1:], [0, 1]), down], 0)[..., 0]

    @override
    def patch_products(
        self, images: tf.Tensor, size: Sequence[int]
    ) -> tf.Tensor:
        rows = self._filter_gradients(images, size, _slices(images, size))
        return tf.reshape(tf.stack(rows), [*size, *size, -1])

    def _filter_gradients(
        self,
        images: tf.Tensor,
        size: Sequence[int],
        outputs: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Depthwise filter gradients `(*size, channels, 1)` of outputs."""
        sizes = tf.convert_to_tensor([*size, size_of(images, -1), 1])
        gradients = [
            tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                input=images,
                filter_sizes=sizes,
                out_backprop=output,
                strides=[1] * 4,
                padding="VALID",
            )
            for output in outputs
        ]
        # TensorFlow does not initialise the result of an empty batch.
        is_empty = tf.equal(tf.shape(images)[0], 0)
        return [tf.where(is_empty, tf.zeros_like(g), g) for g in gradients]

    @override
    def as_factor(self, products: tf.Tensor) -> tf.Tensor:
        height, width, *_ = products.shape
        offsets = height * width
        products = tf.reshape(products, [offsets, offsets, -1])
        return tf.transpose(products, [2, 0, 1])

    @override
    def as_row(self, sums: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.reshape(sums, [-1, size_of(sums, -1)]))


class Window(NamedTuple):
    """Images and geometry of a two-dimensional convolution, for `_products`.

    In each dimension the images have at least as many cells as the kernel
    overlaps at positions beyond the outputs.
    """

    images: tf.Tensor
    size: Sequence[int]
    padding: Sequence[tuple[int, int]]
    outputs: Sequence[Any]


def _slices(images: tf.Tensor, size: Sequence[int]) -> list[tf.Tensor]:
    """Cells of all patches at each offset of a kernel of stride 1."""
    sizes = [size_of(images, i + 1) - n + 1 for i, n in enumerate(size)]
    shape = tf.convert_to_tensor([-1, *sizes, -1])
    slices = [tf.slice(images, [0, *i, 0], shape) for i in np.ndindex(*size)]
    for cut in slices:  # Restore the static number of channels.
        cut.set_shape([None, None, None, images.shape[-1]])
    return slices


def patch_gram(images: tf.Tensor, geometry: Geometry, bias: bool) -> Statistic:
    """Sum of `p p^T` over the patches `p` of a convolution.

    The elements of a patch have the order `(kernel size..., channels)`,
    followed by a 1 if there is a bias.
    """
    window = _window(images, geometry, _is_large(images.shape[1:3], geometry))
    statistic = _statistic(AllChannelPairs(), window, bias)
    if max(geometry.strides) == 1:
        return statistic
    # Indices of patch elements in the patch after space-to-depth.
    shape = [*_in_strides(geometry), *geometry.strides, images.shape[-1]]
    indices = np.arange(np.prod(shape)).reshape(shape)
    indices = indices.transpose(0, 2, 1, 3, 4)
    (rows, height, columns, width, channels) = indices.shape
    indices = indices.reshape(rows * height, columns * width, channels)
    order = indices[: geometry.size[0], : geometry.size[1]].ravel()
    if bias:
        order = np.append(order, statistic.total.shape[0] - 1)
    total = tf.gather(tf.gather(statistic.total, order), order, axis=1)
    return Statistic(total, statistic.count)


def channel_grams(
    images: tf.Tensor, geometry: Geometry, bias: bool
) -> Statistic:
    """Compute `patch_gram` of each channel, for stride 1."""
    is_large = _is_large(images.shape[1:3], geometry)

    def grams(images: tf.Tensor) -> Statistic:
        window = _window(images, geometry, is_large)
        return _statistic(SameChannelPairs(), window, bias)

    signature = "channel grams", geometry, bias, is_large
    statistic = shared_call(signature, grams, images, any_size=True)
    elements = math.prod(geometry.size) + bias
    statistic.total.set_shape([images.shape[-1], elements, elements])
    return statistic


def _statistic(pairs: AllChannelPairs, window: Window, bias: bool) -> Statistic:
    """Compute the factor; append the row and the column of the bias."""
    total = pairs.as_factor(_products(pairs, window))
    height, width = window.outputs
    count = tf.cast(tf.shape(window.images)[0] * height * width, total.dtype)
    if bias:
        # Sum of all patches: the filter gradient for outputs of ones.
        image = tf.reduce_sum(window.images, 0, keepdims=True)
        (top, bottom), (left, right) = window.padding
        patch_sum = tf.raw_ops.Conv2DBackpropFilter(
            input=image,
            filter_sizes=[*window.size, size_of(image, -1), 1],
            out_backprop=tf.ones([1, *window.outputs, 1], image.dtype),
            strides=[1] * 4,
            padding="EXPLICIT",
            explicit_paddings=[0, 0, top, bottom, left, right, 0, 0],
        )
        sums = pairs.as_row(patch_sum[..., 0])
        total = tf.concat([total, sums[..., None, :]], -2)
        column = tf.concat([sums, tf.zeros_like(sums[..., :1]) + count], -1)
        total = tf.concat([total, column[..., None]], -1)
    return Statistic(total, count)


def costs(
    shape: Sequence[int | None], geometry: Geometry
) -> tuple[float, float]:
    """Estimate the cost of `patch_gram` and of the product of patches.

    The unit is one multiplication of a large matrix product. The coefficients
    were fitted to 39 convolutions on a CPU: 1 to 512 channels, images of 2 to
    64 cells per side, kernels of 1 to 7 and strides of 1 to 3. The comparison
    was wrong only where both times were within 10 %. An unknown size counts
    as 32.
    """
    kernel_size, strides = geometry.size, geometry.strides
    batch, *cells, channels = [32 if n is None else n for n in shape]
    outputs = [
        fit_axis(*sizes, geometry.padding)[1]
        for sizes in zip(cells, kernel_size, strides, strict=True)
    ]
    elements = math.prod(kernel_size) * channels
    by_patches = batch * math.prod(outputs) * elements * (elements + 200)

    # Size of the convolution after the space-to-depth reshape of `_window`.
    size = _in_strides(geometry)
    if not _is_large(cells, geometry):
        cells = [n + k - 1 for n, k in zip(outputs, size, strict=True)]
    channels *= math.prod(strides)
    (rows, columns), (height, width) = cells, size
    shifts = height * (2 * width - 1)
    correlation = rows * columns * shifts * (2.5 * channels**2 + 400)
    edges = (
        (columns + width - 1) * _edge_cost(rows, outputs[0], height) * width**2
        + outputs[0] * _edge_cost(columns, outputs[1], width) * height**2
    ) * channels**2
    matrix = 700 * (height * width * channels) ** 2
    return batch * (correlation + edges) + matrix, by_patches


def _edge_cost(cells: int, outputs: int, kernel: int) -> float:
    """Return `2 (p / 2)^2`, for p positions beyond the outputs of an axis."""
    return (cells + kernel - 1 - outputs) ** 2 / 2


# ---------------------------------------------------- padding and strides
def _in_strides(geometry: Geometry) -> list[int]:
    """Size of a kernel in units of strides, rounded up."""
    pairs = zip(geometry.size, geometry.strides, strict=True)
    return [-(-size // stride) for size, stride in pairs]


def _is_large(cells: Sequence[int | None], geometry: Geometry) -> bool:
    """True for stride 1 and images known to be at least as large as a patch."""
    return max(geometry.strides) == 1 and all(
        n is not None and n >= k
        for n, k in zip(cells, geometry.size, strict=True)
    )


def _window(images: tf.Tensor, geometry: Geometry, is_large: bool) -> Window:
    """Convert a convolution to stride 1; if `is_large`, do not pad images."""
    if is_large:
        paddings, sizes = [], []
        for axis, size in enumerate(geometry.size, start=1):
            # The padding for stride 1 is equal for images of all sizes.
            before, count = fit_axis(size, size, 1, geometry.padding)
            paddings.append((before, count - 1 - before))
            sizes.append(size_of(images, axis) + count - size)
        return Window(images, geometry.size, paddings, sizes)
    # Pad or crop the images to the cells that the patches cover.
    index, paddings, outputs = [slice(None)], [(0, 0)], []
    for axis, (size, stride) in enumerate(
        zip(geometry.size, geometry.strides, strict=True), start=1
    ):
        cells = size_of(images, axis)
        before, count = fit_axis(cells, size, stride, geometry.padding)
        num_used = (count + (size - 1) // stride) * stride - before
        index.append(slice(num_used))
        paddings.append((before, maximum(num_used - cells, 0)))
        outputs.append(count)
    channels = images.shape[-1]
    images = tf.pad(images[tuple(index)], [*paddings, (0, 0)])
    # Restore the static number of channels, which dynamic padding loses.
    images.set_shape([None, None, None, channels])
    small = _in_strides(geometry)
    if max(geometry.strides) > 1:
        # Space-to-depth: move the cells of each stride block to the channels.
        rows, columns = (n + k - 1 for n, k in zip(outputs, small, strict=True))
        height, width = geometry.strides
        shape = [tf.shape(images)[0], rows, height, columns, width * channels]
        images = tf.transpose(tf.reshape(images, shape), [0, 1, 3, 2, 4])
        shape = [shape[0], rows, columns, height * width * channels]
        images = tf.reshape(images, shape)
    return Window(images, small, [(0, 0)] * 2, outputs)


# --------------------------------------------------------------- stride 1
def _products(pairs: AllChannelPairs, window: Window) -> tf.Tensor:
    """Products of all pairs of offsets, in the shape of `patch_products`."""
    height, width = window.size
    shifts = pairs.correlation(window.images, window.size)
    # Expand the autocorrelation to all pairs of kernel offsets.
    down, right = (i.ravel() for i in np.indices((height, width)))
    down = down - down[:, None] + height - 1
    right = right - right[:, None] + width - 1
    channels = [-1 if n is None else n for n in shifts.shape[2:]]
    flat = tf.reshape(shifts, [(2 * height - 1) * (2 * width - 1), *channels])
    total = tf.gather(flat, down * (2 * width - 1) + right)
    total = tf.reshape(total, [*window.size, *window.size, *channels])
    # Only the top and bottom edges include the corners, by full padding.
    other_paddings = [(width - 1, width - 1), window.padding[0]]
    for axis, at_end in itertools.product((0, 1), (False, True)):
        # Subtract patches at positions beyond this end of the outputs.
        size = window.size[axis]
        cells = size - 1 - window.padding[axis][at_end]
        if not cells:
            continue
        edge = slice(-cells, None) if at_end else slice(cells)
        images = window.images
        strip = images[:, edge] if axis == 0 else images[:, :, edge]
        paddings = [[0, 0]] * 4
        paddings[2 - axis] = list(other_paddings[axis])
        kernel = [cells, width] if axis == 0 else [height, cells]
        products = pairs.patch_products(tf.pad(strip, paddings), kernel)
        for overlap in range(1, cells + 1):
            # At this position the kernel overlaps `overlap` cells of the strip.
            outside, hidden = size - overlap, cells - overlap
            index = [slice(None)] * 4
            paddings = [[0, 0]] * total.shape.rank
            for i in (axis, axis + 2):
                index[i] = slice(hidden, None) if at_end else slice(overlap)
                paddings[i] = [0, outside] if at_end else [outside, 0]
            total -= tf.pad(products[tuple(index)], paddings)
    return total
