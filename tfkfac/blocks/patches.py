"""Convolution patches in the order of Keras' kernels."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def extract_patches(
    inputs: tf.Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: str,
) -> list[tf.Tensor]:
    """Slices an image once for every offset of a convolution kernel.

    Args:
        inputs: `(batch, *spatial, channels)` with 1 to 3 spatial dimensions.
        kernel_size: Size of the kernel in each spatial dimension.
        strides: Strides of the convolution.
        dilation: Dilation of the kernel.
        padding: "valid", "same" (TensorFlow's, where an odd cell goes to the
            end) or "causal".

    Returns:
        One tensor `(batch, *outputs, channels)` for each kernel offset, in
        row-major order of the offsets.
    """
    paddings: list[Any] = [[0, 0]]
    outputs = []
    for axis, (size, stride, rate) in enumerate(
        zip(kernel_size, strides, dilation, strict=True), start=1
    ):
        cells = inputs.shape[axis]
        cells = tf.shape(inputs)[axis] if cells is None else cells
        before, after, output = _geometry(
            cells, (size - 1) * rate + 1, stride, padding
        )
        paddings.append([before, after])
        outputs.append(output)
    padded = tf.pad(inputs, [*paddings, [0, 0]])
    # The channels' static size is lost where the padding is dynamic.
    padded.set_shape([None] * (len(outputs) + 1) + [inputs.shape[-1]])
    return [
        _slice(padded, offset, outputs, strides, dilation)
        for offset in _offsets(kernel_size)
    ]


def _geometry(
    size: Any, extent: int, stride: int, padding: str
) -> tuple[Any, Any, Any]:
    """Padding before and after, and the output size, of one dimension.

    All are Python integers when `size` is one, else tensors.
    """
    if padding == "valid":
        return 0, 0, (size - extent) // stride + 1
    if padding == "causal":
        return extent - 1, 0, (size - 1) // stride + 1
    output = (size + stride - 1) // stride
    total = (output - 1) * stride + extent - size
    total = max(total, 0) if isinstance(size, int) else tf.maximum(total, 0)
    return total // 2, total - total // 2, output


def _offsets(kernel_size: Sequence[int]) -> list[tuple[int, ...]]:
    """All offsets within the kernel, the last dimension fastest."""
    offsets: list[tuple[int, ...]] = [()]
    for size in kernel_size:
        offsets = [(*offset, i) for offset in offsets for i in range(size)]
    return offsets


def _slice(
    padded: tf.Tensor,
    offset: Sequence[int],
    outputs: Sequence[Any],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> tf.Tensor:
    """The input cell under one kernel offset, for every output position."""
    index: list[slice] = [slice(None)]
    for start, count, stride, rate in zip(
        offset, outputs, strides, dilation, strict=True
    ):
        begin = start * rate
        end = begin + (count - 1) * stride + 1
        index.append(slice(begin, end, stride))
    return padded[tuple(index)]
