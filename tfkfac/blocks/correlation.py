"""Sums of the outer products of convolution patches, without the patches.

Were the patches taken at every position that overlaps the image, the product
of two kernel offsets would depend on their distance alone: it would be the
image's correlation with itself at that shift. One filter gradient computes it
for all shifts. Too much in it are the positions just outside of the outputs,
at which few offsets see the image; they are taken off, edge by edge.

With the cells of a stride moved to the channels, a strided convolution is one
of stride 1 with a smaller kernel.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfkfac.blocks.patches import extract_patches, fit, geometry
from tfkfac.blocks.rows import Statistic, fold_positions


class Window(NamedTuple):
    """A convolution of stride 1 in two dimensions.

    Attributes:
        images: `(batch, height, width, channels)`, in each dimension no
            smaller than what the kernel can overlap of it outside of the
            outputs.
        size: Height and width of the kernel.
        padding: Zeros before and after the image in each dimension.
        outputs: Height and width of the outputs.
    """

    images: tf.Tensor
    size: Sequence[int]
    padding: Sequence[tuple[int, int]]
    outputs: Sequence[Any]


def patch_gram(
    images: tf.Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    bias: bool,
) -> Statistic:
    """Sum of `p p^T` over the patches `p` of a convolution.

    Args:
        images: `(batch, height, width, channels)`.
        kernel_size: Height and width of the kernel.
        strides: Strides of the convolution.
        padding: "valid", "same" or "causal", as in `extract_patches`.
        bias: Whether a patch has a 1 at its end.

    Returns:
        The sum, a matrix, and the number of patches. The elements of a patch
        are in the order `(kernel size..., channels)`.
    """
    window = _window(images, kernel_size, strides, padding)
    total = _gram(window)
    high, wide = window.outputs
    count = tf.cast(tf.shape(images)[0] * high * wide, images.dtype)
    if bias:
        sums = _patch_sum(window)
        total = tf.concat([total, sums[None]], 0)
        column = tf.concat([sums, count[None]], 0)
        total = tf.concat([total, column[:, None]], 1)
    if max(strides) > 1:
        order = _unfolded(kernel_size, strides, images.shape[-1])
        order = np.append(order, [total.shape[0] - 1] * bias).astype(int)
        total = tf.gather(tf.gather(total, order), order, axis=1)
    return Statistic(total, count)


def is_cheaper(
    shape: Sequence[int | None],
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
) -> bool:
    """Whether `patch_gram` takes less time than the patches do.

    What one costs was fitted to 38 convolutions on a CPU (1 to 512 channels,
    images of 2 to 64 cells, kernels of 1 to 7, strides of 1 to 3), in
    multiplications of a large product. There the decision was wrong where the
    two were within a fifth of each other.

    Args:
        shape: Static shape of the images. An unknown size is taken for 32.
        kernel_size: Height and width of the kernel.
        strides: Strides of the convolution.
        padding: As in `patch_gram`.
    """
    if max(kernel_size) == 1:
        return False  # the image has the patches
    batch, *cells, channels = [32 if n is None else n for n in shape]
    outputs = [
        geometry(*sizes, padding)[1]
        for sizes in zip(cells, kernel_size, strides, strict=True)
    ]
    elements = math.prod(kernel_size) * channels
    # Cells that are picked by a stride are copied more slowly.
    copying = 200 if max(strides) == 1 else 750
    by_patches = batch * math.prod(outputs) * elements * (elements + copying)

    # As in `_window`.
    size = [-(-k // s) for k, s in zip(kernel_size, strides, strict=True)]
    implicit = max(strides) == 1 and all(
        n >= k for n, k in zip(cells, kernel_size, strict=True)
    )
    if not implicit:
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
    return batch * (correlation + edges) + matrix < by_patches


def _edges(cells: int, outputs: int, kernel: int) -> float:
    """Squared cells of the two edges of an axis, about."""
    outside = cells + kernel - 1 - outputs
    return outside**2 / 2


# ---------------------------------------------------- padding and strides
def _window(
    images: tf.Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
) -> Window:
    """The convolution of stride 1 that has the same patches in its patches.

    Its zeros are written out, unless no cell has to move and the image is
    known to be large enough.
    """
    cells = images.shape[1:3]
    if max(strides) == 1 and all(
        size is not None and size >= kernel
        for size, kernel in zip(cells, kernel_size, strict=True)
    ):
        ends, outputs = [], []
        for size, kernel in zip(cells, kernel_size, strict=True):
            before, count = geometry(size, kernel, 1, padding)
            ends.append((before, count + kernel - 1 - size - before))
            outputs.append(count)
        return Window(images, kernel_size, ends, outputs)
    image, outputs = fit(images, kernel_size, strides, (1, 1), padding)
    small = [-(-k // s) for k, s in zip(kernel_size, strides, strict=True)]
    blocks = [n + k - 1 for n, k in zip(outputs, small, strict=True)]
    return Window(_fold(image, blocks, strides), small, [(0, 0)] * 2, outputs)


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


def _unfolded(
    kernel_size: Sequence[int], strides: Sequence[int], channels: int
) -> np.ndarray:
    """Where the elements of a patch are in the patch of the folded image."""
    small = [-(-k // s) for k, s in zip(kernel_size, strides, strict=True)]
    shape = [*small, *strides, channels]
    places = np.arange(np.prod(shape)).reshape(shape)
    places = places.transpose(0, 2, 1, 3, 4)
    (rows, high, columns, wide, _) = places.shape
    places = places.reshape(rows * high, columns * wide, channels)
    return places[: kernel_size[0], : kernel_size[1]].ravel()


# --------------------------------------------------------------- stride 1
def _gram(window: Window) -> tf.Tensor:
    """Sum of the outer products of the patches."""
    total = _spread(_correlation(window.images, window.size), window.size)
    # Whole rows of positions, then the columns beside the outputs.
    (high, wide), channels = window.size, window.images.shape[-1]
    full = (wide - 1, wide - 1)
    for axis, along in ((0, full), (1, window.padding[0])):
        for at_end in (False, True):
            total = _without_edge(total, window, axis, along, at_end)
    size = high * wide * channels
    return tf.reshape(total, [size, size])


def _correlation(images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Correlation of an image with itself.

    Returns:
        `sum x[u, c] x[u + d, c']` for the shifts d that are smaller than the
        kernel, of shape `(c, 2 height - 1, 2 width - 1, c')`.
    """
    (high, wide), channels = size, images.shape[-1]
    half = tf.raw_ops.Conv2DBackpropFilter(
        input=images,
        filter_sizes=[high, 2 * wide - 1, channels, channels],
        out_backprop=images,
        strides=[1] * 4,
        padding="EXPLICIT",
        explicit_paddings=[0, 0, 0, high - 1, wide - 1, wide - 1, 0, 0],
    )  # shifts down, shifts to both sides, c', c
    # The opposite shift has the channels exchanged.
    up = tf.transpose(tf.reverse(half[1:], [0, 1]), [2, 0, 1, 3])
    down = tf.transpose(half, [3, 0, 1, 2])
    return tf.concat([up, down], 1)


def _spread(shifts: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """The products of all pairs of offsets, those at their distance."""
    (high, wide), channels = size, shifts.shape[-1]
    down, right = (i.ravel() for i in np.indices((high, wide)))
    down = down - down[:, None] + high - 1
    right = right - right[:, None] + wide - 1
    flat = tf.reshape(shifts, [channels, -1, channels])
    pairs = tf.gather(flat, down * (2 * wide - 1) + right, axis=1)
    pairs = tf.transpose(pairs, [1, 0, 2, 3])
    return tf.reshape(pairs, [*size, channels] * 2)


def _without_edge(
    total: tf.Tensor,
    window: Window,
    axis: int,
    along: tuple[int, int],
    at_end: bool,
) -> tf.Tensor:
    """Takes off the positions beyond one end of the outputs.

    Args:
        total: `(height, width, channels)` of the kernel, twice.
        window: The convolution.
        axis: The dimension that has the end.
        along: Padding of the image in the other dimension.
        at_end: Whether it is the end that follows the outputs.
    """
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
    gram = _gram_of_patches(strip, kernel)
    for seen in range(1, cells + 1):
        # A position at which that many cells are seen, by as many offsets.
        unseen, hidden = size - seen, cells - seen
        index = [slice(None)] * 6
        paddings = [[0, 0]] * 6
        for i in (axis, axis + 3):
            index[i] = slice(hidden, None) if at_end else slice(seen)
            paddings[i] = [0, unseen] if at_end else [unseen, 0]
        total -= tf.pad(gram[tuple(index)], paddings)
    return total


def _gram_of_patches(images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    ones = [1] * len(size)
    slices = extract_patches(images, size, ones, ones, "valid")
    rows = fold_positions(tf.concat(slices, -1))
    rows = tf.reshape(rows, [-1, rows.shape[-1]])
    shape = [*size, images.shape[-1]]
    return tf.reshape(tf.matmul(rows, rows, transpose_a=True), shape * 2)


def _patch_sum(window: Window) -> tf.Tensor:
    """Sum of the patches: the filter gradient of a sum of outputs."""
    image = tf.reduce_sum(window.images, 0, keepdims=True)
    (high, wide), channels = window.size, image.shape[-1]
    (top, bottom), (left, right) = window.padding
    sums = tf.raw_ops.Conv2DBackpropFilter(
        input=image,
        filter_sizes=[high, wide, channels, 1],
        out_backprop=tf.ones([1, *window.outputs, 1], image.dtype),
        strides=[1] * 4,
        padding="EXPLICIT",
        explicit_paddings=[0, 0, top, bottom, left, right, 0, 0],
    )
    return tf.reshape(sums, [high * wide * channels])
