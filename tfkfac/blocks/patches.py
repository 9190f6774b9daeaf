"""Patches of convolutions, and the sums of their outer products.

The sums do without patches. Were these taken at every position that overlaps
the image, the product of two kernel offsets would depend on their distance
alone: it would be the image's correlation with itself at that shift. One filter
gradient computes it for all shifts. Too much in it are the positions just
outside of the outputs, at which few offsets see the image; they are taken off,
edge by edge.

With the cells of a stride moved to the channels, a strided convolution is one
of stride 1 with a smaller kernel.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.rows import Statistic, size_of
from tfkfac.compat.functions import shared_call


class Geometry(NamedTuple):
    """Geometry of a convolution; the padding is one of Keras'.

    That is "valid", "same" (where an odd cell goes to the end) or "causal".
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str
    dilation: tuple[int, ...] = (1, 1)


def extract_patches(inputs: tf.Tensor, geometry: Geometry) -> list[tf.Tensor]:
    """Slices an image once for every offset of a convolution kernel.

    Inputs are `(batch, *spatial, channels)` with 1 to 3 spatial dimensions.
    Each offset has a tensor `(batch, *outputs, channels)`, in row-major order.
    """
    kernel_size, strides, _, dilation = geometry
    image, counts = fit(inputs, geometry)
    starts = [
        [i * rate for i, rate in zip(offset, dilation, strict=True)]
        for offset in np.ndindex(*kernel_size)
    ]
    if max(strides) == 1:
        return _slices(image, starts, counts)
    # A slice with a stride copies its numbers one by one; one without, of an
    # image in blocks of a stride, copies whole channels: 2 to 12 times faster.
    shape = [tf.shape(image)[0]]
    for axis, stride in enumerate(strides, start=1):
        shape += [size_of(image, axis) // stride, stride]
    blocks = tf.reshape(image, [*shape, size_of(image, -1)])
    starts = [
        [place for pair in map(divmod, start, strides) for place in pair]
        for start in starts
    ]
    sizes = [size for count in counts for size in (count, 1)]
    cells = list(range(2, len(shape), 2))
    return [tf.squeeze(part, cells) for part in _slices(blocks, starts, sizes)]


def _slices(
    image: tf.Tensor, starts: Sequence[Sequence[int]], sizes: Sequence[Any]
) -> list[tf.Tensor]:
    """Parts of equal size of all images of a batch, with all channels."""
    size = tf.convert_to_tensor([-1, *sizes, -1])
    parts = [tf.slice(image, [0, *start, 0], size) for start in starts]
    for part in parts:  # what is lost where a size is dynamic
        part.set_shape([None] * (len(sizes) + 1) + [image.shape[-1]])
    return parts


def fit(inputs: tf.Tensor, geometry: Geometry) -> tuple[tf.Tensor, list[Any]]:
    """Pads or cuts an image to what the patches cover, in whole strides.

    It comes with the number of outputs in each dimension.
    """
    kernel_size, strides, padding, dilation = geometry
    index, paddings, outputs = [slice(None)], [(0, 0)], []
    for axis, (size, stride, rate) in enumerate(
        zip(kernel_size, strides, dilation, strict=True), start=1
    ):
        extent, cells = (size - 1) * rate + 1, size_of(inputs, axis)
        if stride == 1:
            paddings.append(ends(extent, padding))
            index.append(slice(None))
            outputs.append(longer(cells, sum(paddings[-1]) + 1 - extent))
            continue
        before, count = fit_axis(cells, extent, stride, padding)
        rest = (count + (extent - 1) // stride) * stride - before
        index.append(slice(rest))
        paddings.append((before, _larger(rest - cells, 0)))
        outputs.append(count)
    if max(strides) > 1:
        inputs = inputs[tuple(index)]
    if all(isinstance(n, int) and not n for pair in paddings for n in pair):
        return inputs, outputs
    padded = tf.pad(inputs, [*paddings, (0, 0)])
    # The channels' static size is lost where the padding is dynamic.
    padded.set_shape([None] * (len(outputs) + 1) + [inputs.shape[-1]])
    return padded, outputs


def ends(extent: int, padding: str) -> tuple[int, int]:
    """Padding before and after where the stride is 1, whatever the size."""
    before, count = fit_axis(extent, extent, 1, padding)
    return before, count - 1 - before


def longer(size: Any, by: int) -> Any:
    """A size and a number; no operation if that is zero."""
    return size + by if by else size


def fit_axis(
    size: Any, extent: int, stride: int, padding: str
) -> tuple[Any, Any]:
    """Padding before, and the output size, of one dimension.

    Both are Python integers when `size` is one, else tensors.
    """
    if padding == "valid":
        return 0, (size - extent) // stride + 1
    if padding == "causal":
        return extent - 1, (size - 1) // stride + 1
    output = (size + stride - 1) // stride
    return _larger((output - 1) * stride + extent - size, 0) // 2, output


def _larger(number: Any, least: int) -> Any:
    """The maximum, a Python integer if the number is one."""
    if isinstance(number, int):
        return max(number, least)
    return tf.maximum(number, least)


class Products:
    """Sums of the products of all pairs of channels, two dimensions of them.

    They are over positions and examples; images are `(batch, height, width,
    channels)`.
    """

    def at_shifts(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        """Products of an image with itself, `sum x[u] x[u + d]`.

        The shifts `d` are below `size`, down and right, in absolute values:
        `(2 down - 1, 2 right - 1, ...)`, a negative shift first.
        """
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

    def of_patches(
        self, images: tf.Tensor, size: Sequence[int], stride: int = 1
    ) -> tf.Tensor:
        """Products of all pairs of offsets of a kernel.

        They are `(height, width, height, width, ...)` with the kernel's size.
        """
        geometry = Geometry(tuple(size), (stride, stride), "valid")
        slices = extract_patches(images, geometry)
        rows = tf.concat(slices, -1)
        rows = tf.reshape(rows, [-1, rows.shape[-1]])
        gram = tf.matmul(rows, rows, transpose_a=True)
        gram = tf.reshape(gram, [*size, images.shape[-1]] * 2)
        return tf.transpose(gram, [0, 1, 3, 4, 2, 5])

    def as_factor(self, products: tf.Tensor) -> tf.Tensor:
        """The result of `of_patches` as a matrix, or a stack of them."""
        high, wide, *_, channels = products.shape
        offsets, elements = high * wide, high * wide * channels
        products = tf.reshape(products, [offsets, offsets, channels, channels])
        products = tf.transpose(products, [0, 2, 1, 3])
        return tf.reshape(products, [elements, elements])

    def as_row(self, sums: tf.Tensor) -> tf.Tensor:
        """A sum of patches `(height, width, channels)` in the same order."""
        return tf.reshape(sums, [-1])


class EachChannel(Products):
    """Products of each channel with itself, in one dimension."""

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
        geometry = Geometry(tuple(size), (stride, stride), "valid")
        slices = extract_patches(images, geometry)
        rows = self._gradients(images, size, slices, stride)
        return tf.reshape(tf.stack(rows), [*size, *size, -1])

    def _gradients(
        self,
        images: tf.Tensor,
        size: Sequence[int],
        outputs: Sequence[tf.Tensor],
        stride: int,
    ) -> list[tf.Tensor]:
        """Products of outputs with what the kernel sees, `(*size, c, 1)`."""
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


class Window(NamedTuple):
    """A convolution in two dimensions.

    In each dimension the images are no smaller than what the kernel can
    overlap of them outside of the outputs.
    """

    images: tf.Tensor
    size: Sequence[int]
    padding: Sequence[tuple[int, int]]
    outputs: Sequence[Any]
    stride: int = 1  # but for the patches of each channel offset by offset


def patch_gram(images: tf.Tensor, geometry: Geometry, bias: bool) -> Statistic:
    """Sum of `p p^T` over the patches `p` of a convolution.

    The elements of a patch are in the order `(kernel size..., channels)`, with
    a 1 at the end for a bias.
    """
    window, kind = _window(images, geometry), Products()
    statistic = _statistic(kind, _products(kind, window), window, bias)
    if max(geometry.strides) == 1:
        return statistic
    order = _unfolded(geometry, images.shape[-1])
    if bias:
        order = np.append(order, statistic.total.shape[0] - 1)
    total = tf.gather(tf.gather(statistic.total, order), order, axis=1)
    return Statistic(total, statistic.count)


def channel_grams(
    images: tf.Tensor, geometry: Geometry, bias: bool
) -> Statistic:
    """`patch_gram` of each channel, a matrix of each; the strides are equal."""
    size, (stride, _), kind = geometry.size, geometry.strides, EachChannel()
    by_shifts = stride == 1 and _is_large(images.shape[1:3], size)

    def grams(images: tf.Tensor) -> Statistic:
        if by_shifts:
            window = _unpadded(images, geometry)
            return _statistic(kind, _products(kind, window), window, bias)
        # Where cells would move to other channels: offset by offset.
        image, outputs = fit(images, geometry)
        window = Window(image, size, [(0, 0)] * 2, outputs, stride)
        products = kind.of_patches(image, size, stride)
        return _statistic(kind, products, window, bias)

    signature = "channel grams", geometry, bias, by_shifts
    statistic = shared_call(signature, grams, images, any_size=True)
    elements = math.prod(size) + bias
    statistic.total.set_shape([images.shape[-1], elements, elements])
    return statistic


def _statistic(
    kind: Products, products: tf.Tensor, window: Window, bias: bool
) -> Statistic:
    """Brings products to their place, with those of the bias' 1."""
    total, (high, wide) = kind.as_factor(products), window.outputs
    count = tf.cast(tf.shape(window.images)[0] * high * wide, total.dtype)
    if bias:
        sums = kind.as_row(_patch_sum(window))
        total = tf.concat([total, sums[..., None, :]], -2)
        last = tf.zeros_like(sums[..., :1]) + count
        column = tf.concat([sums, last], -1)
        total = tf.concat([total, column[..., None]], -1)
    return Statistic(total, count)


def is_cheaper(shape: Sequence[int | None], geometry: Geometry) -> bool:
    """True if `patch_gram` takes less time than the patches, see `costs`."""
    if max(geometry.size) == 1:
        return False  # the image has the patches
    by_correlation, by_patches = costs(shape, geometry)
    return by_correlation < by_patches


def costs(
    shape: Sequence[int | None], geometry: Geometry
) -> tuple[float, float]:
    """Costs of the sum by `patch_gram`, and by the patches.

    It was fitted to 39 convolutions on a CPU (1 to 512 channels,
    images of 2 to 64 cells, kernels of 1 to 7, strides of 1 to 3), in
    multiplications of a large product. The smaller one was not the quicker
    way only where the two were within a tenth of each other. A size of the
    images that is not known is taken for 32.
    """
    kernel_size, strides = geometry.size, geometry.strides
    batch, *cells, channels = [32 if n is None else n for n in shape]
    outputs = [
        fit_axis(*sizes, geometry.padding)[1]
        for sizes in zip(cells, kernel_size, strides, strict=True)
    ]
    elements = math.prod(kernel_size) * channels
    by_patches = batch * math.prod(outputs) * elements * (elements + 200)

    # As in `_window`.
    size = _in_strides(geometry)
    if max(strides) > 1 or not _is_large(cells, kernel_size):
        cells = [n + k - 1 for n, k in zip(outputs, size, strict=True)]
    channels *= math.prod(strides)
    (rows, columns), (high, wide) = cells, size
    shifts = high * (2 * wide - 1)
    correlation = rows * columns * shifts * (2.5 * channels**2 + 400)
    edges = (
        (columns + wide - 1) * _edges(rows, outputs[0], high) * wide**2
        + outputs[0] * _edges(columns, outputs[1], wide) * high**2
    ) * channels**2
    matrix = 700 * (high * wide * channels) ** 2
    return batch * (correlation + edges) + matrix, by_patches


def _edges(cells: int, outputs: int, kernel: int) -> float:
    """Squared cells of the two edges of an axis, about."""
    outside = cells + kernel - 1 - outputs
    return outside**2 / 2


# ---------------------------------------------------- padding and strides
def _window(images: tf.Tensor, geometry: Geometry) -> Window:
    """The convolution of stride 1 that has the same patches in its patches.

    Its zeros are written out, unless no cell has to move and the image is
    known to be large enough.
    """
    size, strides = geometry.size, geometry.strides
    if max(strides) == 1 and _is_large(images.shape[1:3], size):
        return _unpadded(images, geometry)
    image, outputs = fit(images, geometry)
    small = _in_strides(geometry)
    blocks = [n + k - 1 for n, k in zip(outputs, small, strict=True)]
    return Window(_fold(image, blocks, strides), small, [(0, 0)] * 2, outputs)


def _in_strides(geometry: Geometry) -> list[int]:
    """Size of a kernel in whole strides."""
    pairs = zip(geometry.size, geometry.strides, strict=True)
    return [-(-size // stride) for size, stride in pairs]


def _unpadded(images: tf.Tensor, geometry: Geometry) -> Window:
    """A convolution of stride 1 of images that are large enough."""
    paddings = [ends(kernel, geometry.padding) for kernel in geometry.size]
    outputs = [
        longer(size_of(images, axis), sum(paddings[axis - 1]) + 1 - kernel)
        for axis, kernel in enumerate(geometry.size, start=1)
    ]
    return Window(images, geometry.size, paddings, outputs)


def _is_large(cells: Sequence[int | None], kernel: Sequence[int]) -> bool:
    """True if an image is known to be no smaller than the kernel."""
    return all(
        n is not None and n >= k for n, k in zip(cells, kernel, strict=True)
    )


def _fold(
    image: tf.Tensor, blocks: Sequence[Any], strides: Sequence[int]
) -> tf.Tensor:
    """Moves the cells of a stride to the channels."""
    if max(strides) == 1:
        return image
    batch, channels = tf.shape(image)[0], image.shape[-1]
    (rows, columns), (high, wide) = blocks, strides
    shape = [batch, rows, high, columns, wide * channels]
    image = tf.transpose(tf.reshape(image, shape), [0, 1, 3, 2, 4])
    return tf.reshape(image, [batch, rows, columns, high * wide * channels])


def _unfolded(geometry: Geometry, channels: int) -> np.ndarray:
    """Positions of a patch's elements in the patch of the folded image."""
    shape = [*_in_strides(geometry), *geometry.strides, channels]
    places = np.arange(np.prod(shape)).reshape(shape)
    places = places.transpose(0, 2, 1, 3, 4)
    (rows, high, columns, wide, _) = places.shape
    places = places.reshape(rows * high, columns * wide, channels)
    return places[: geometry.size[0], : geometry.size[1]].ravel()


# --------------------------------------------------------------- stride 1
def _products(kind: Products, window: Window) -> tf.Tensor:
    """The products of all pairs of offsets, `(height, width)` twice."""
    total = _spread(kind.at_shifts(window.images, window.size), window.size)
    # Whole rows of positions, then the columns beside the outputs.
    full = (window.size[1] - 1, window.size[1] - 1)
    for axis, along in ((0, full), (1, window.padding[0])):
        for at_end in (False, True):
            total = _without_edge(kind, total, window, axis, along, at_end)
    return total


def _spread(shifts: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """The products of two offsets are those at their distance."""
    high, wide = size
    down, right = (i.ravel() for i in np.indices((high, wide)))
    down = down - down[:, None] + high - 1
    right = right - right[:, None] + wide - 1
    channels = [-1 if n is None else n for n in shifts.shape[2:]]
    flat = tf.reshape(shifts, [(2 * high - 1) * (2 * wide - 1), *channels])
    pairs = tf.gather(flat, down * (2 * wide - 1) + right)
    return tf.reshape(pairs, [*size, *size, *channels])


def _without_edge(
    kind: Products,
    total: tf.Tensor,
    window: Window,
    axis: int,
    along: tuple[int, int],
    at_end: bool,
) -> tf.Tensor:
    """Takes off the positions beyond one end of the outputs in one axis."""
    size = window.size[axis]
    cells = size - 1 - window.padding[axis][at_end]
    if not cells:
        return total
    part = slice(-cells, None) if at_end else slice(cells)
    images = window.images
    strip = images[:, part] if axis == 0 else images[:, :, part]
    paddings = [[0, 0]] * 4
    paddings[2 - axis] = list(along)
    strip = tf.pad(strip, paddings)
    kernel = [cells, window.size[1]] if axis == 0 else [window.size[0], cells]
    edge = kind.of_patches(strip, kernel)
    for seen in range(1, cells + 1):
        # A position at which that many cells are seen, by as many offsets.
        unseen, hidden = size - seen, cells - seen
        index = [slice(None)] * 4
        paddings = [[0, 0]] * total.shape.rank
        for i in (axis, axis + 2):
            index[i] = slice(hidden, None) if at_end else slice(seen)
            paddings[i] = [0, unseen] if at_end else [unseen, 0]
        total -= tf.pad(edge[tuple(index)], paddings)
    return total


def _patch_sum(window: Window) -> tf.Tensor:
    """Sum of the patches: the filter gradient of a sum of outputs."""
    image = tf.reduce_sum(window.images, 0, keepdims=True)
    (top, bottom), (left, right) = window.padding
    sums = tf.raw_ops.Conv2DBackpropFilter(
        input=image,
        filter_sizes=[*window.size, size_of(image, -1), 1],
        out_backprop=tf.ones([1, *window.outputs, 1], image.dtype),
        strides=[1, window.stride, window.stride, 1],
        padding="EXPLICIT",
        explicit_paddings=[0, 0, top, bottom, left, right, 0, 0],
    )
    return sums[..., 0]
