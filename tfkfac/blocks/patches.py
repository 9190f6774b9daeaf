"""Patches of convolutions, as rows of a layer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import tensorflow as tf

from tfkfac.factors import Factor
from tfkfac.linalg.tensors import size_of

# Largest number of elements of a slice of patches: 2 MB in float32.
_SLICE_ELEMENTS = 1 << 19


class Geometry(NamedTuple):
    """Geometry of a convolution."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str  # "valid", "same" (an odd cell goes to the end) or "causal"
    dilation: tuple[int, ...] = (1, 1)


def fit_axis(
    size: Any, extent: int, stride: int, padding: str
) -> tuple[Any, Any]:
    """Padding before, and output size, of one dimension; integers if static."""
    if padding == "valid":
        return 0, (size - extent) // stride + 1
    if padding == "causal":
        return extent - 1, (size - 1) // stride + 1
    output = (size + stride - 1) // stride
    return maximum((output - 1) * stride + extent - size, 0) // 2, output


def maximum(number: Any, minimum: int) -> Any:
    """Maximum; a Python integer if `number` is a Python integer."""
    if isinstance(number, int):
        return max(number, minimum)
    return tf.maximum(number, minimum)


class _Axis(NamedTuple):
    """Spatial dimension of images and their patches; integers if static."""

    cells: Any
    outputs: Any
    stride: int
    before: Any  # number of padded cells before the image


@dataclasses.dataclass(frozen=True)
class Patches:
    """Patches of images: rows `(examples, positions, [groups,] features)`.

    All patches of a batch take many times the memory of the images, 27 times
    for a kernel of size 3 x 3 x 3. So all sums gather slices of the rows, one
    after the other, without a padded copy of the images.
    """

    images: tf.Tensor  # `(batch, *cells, channels)`
    geometry: Geometry
    dtype: tf.DType  # dtype of the rows
    groups: int = 0  # number of channel groups; 0 if rows have no group axis
    bias: bool = False  # True to append a one to each row
    images_per_example: int | tf.Tensor = 1
    weights: tf.Tensor | None = None  # row weights, 1 or 0; None for 1

    @property
    def examples(self) -> Any:
        """Number of examples."""
        return size_of(self.images, 0) // self.images_per_example

    def count(self) -> tf.Tensor:
        """Number of rows of weight 1."""
        if self.weights is None:
            return tf.cast(self._num_rows, self.dtype)
        return tf.reduce_sum(self.weights)

    def gram(self, factor: Factor) -> tf.Tensor:
        """Sum `p p^T` over rows p, as the stored tensor of a factor."""
        gram = factor.repeated_gram(self.dtype)
        return self.sum(lambda rows: gram(rows[:, None]), factor.shape)

    def sum(
        self,
        function: Callable[..., tf.Tensor],
        shape: Sequence[int],
        *others: tf.Tensor,
    ) -> tf.Tensor:
        """Sum `function(rows, *other_rows)` over slices of the rows.

        Args:
            function: Function of tensors `(rows, ...)`, which is zero for rows
                of zeros.
            shape: Shape of the result.
            others: Tensors `(examples, positions, ...)`.
        """
        num_rows = self._num_rows
        limit = max(_SLICE_ELEMENTS // self._num_elements, 1)
        num_slices = maximum((num_rows + limit - 1) // limit, 1)
        # Slices of equal size: the last slice has the fewest invalid rows.
        length = (num_rows + num_slices - 1) // num_slices
        window = tf.range(length)
        flat = [tf.reshape(x, [num_rows, *x.shape[2:]]) for x in others]
        offsets = self._offsets()

        def add(start: tf.Tensor, total: tf.Tensor) -> Sequence[tf.Tensor]:
            row = start + window
            valid, row = row < num_rows, tf.minimum(row, num_rows - 1)
            valid = self._with_weights(valid, row)
            rows = self._features(self._gather(row, valid, offsets), valid)
            term = function(rows, *(tf.gather(x, row) for x in flat))
            return start + length, total + term

        # Run one iteration at a time to bound the memory.
        _, total = tf.while_loop(
            lambda start, _: start < num_rows,
            add,
            (tf.constant(0), tf.zeros(shape, self.dtype)),
            parallel_iterations=1,
        )
        return total

    def position_sums(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Sum over the positions of each example, and count its positions.

        Returns:
            The sums `(examples, 1, [groups,] features)`, and the numbers of
            rows of weight 1, of shape `(examples, 1, [1,] 1)`.
        """
        row, examples = tf.range(self._num_rows), self.examples
        valid = self._with_weights(tf.ones_like(row, tf.bool), row)
        counts = self._by_example(tf.cast(valid, self.dtype))
        ones = tf.ones_like(counts, tf.int32)
        shape = [self.groups] if self.groups else []
        shape.append(self._num_elements // (self.groups or 1) + self.bias)
        sums = self.sum(
            lambda rows, example: tf.math.unsorted_segment_sum(
                rows, example, examples
            ),
            [examples, *shape],
            tf.range(examples)[:, None] * ones,
        )
        counts = tf.reduce_sum(counts, 1)
        return sums[:, None], tf.reshape(counts, [-1, 1, *[1] * len(shape)])

    def are_zero(self) -> tf.Tensor:
        """Return bools `(examples, positions)`, True for rows of zeros."""
        row = tf.range(self._num_rows)
        nonzero = tf.reduce_any(tf.not_equal(self.images, 0), -1, keepdims=True)
        flags = dataclasses.replace(self, images=nonzero, dtype=tf.bool)
        cells = flags._gather(row, tf.ones_like(row, tf.bool), self._offsets())
        return self._by_example(~tf.reduce_any(cells, [1, 2]))

    def select(self, choose: Callable[[tf.Tensor], tf.Tensor]) -> Self:
        """Return the patches of the examples that `choose` selects."""
        sizes = [size_of(self.images, i) for i in range(self.images.shape.rank)]
        images = choose(
            tf.reshape(
                self.images,
                [self.examples, self.images_per_example, *sizes[1:]],
            )
        )
        return dataclasses.replace(
            self, images=tf.reshape(images, [-1, *sizes[1:]])
        )

    def __mul__(self, factor: tf.Tensor) -> Self:
        """Return the patches, multiplied by a scalar."""
        images = tf.cast(self.images, self.dtype) * factor
        return dataclasses.replace(self, images=images)

    @functools.cached_property
    def _axes(self) -> list[_Axis]:
        """Spatial dimensions."""
        kernel_size, strides, padding, dilation = self.geometry
        axes = []
        for i, (size, stride, rate) in enumerate(
            zip(kernel_size, strides, dilation, strict=True), start=1
        ):
            cells, extent = size_of(self.images, i), (size - 1) * rate + 1
            before, outputs = fit_axis(cells, extent, stride, padding)
            axes.append(_Axis(cells, outputs, stride, before))
        return axes

    @property
    def _num_rows(self) -> Any:
        positions = math.prod(axis.outputs for axis in self._axes)
        return size_of(self.images, 0) * positions

    @property
    def _num_elements(self) -> int:
        """Number of elements of a row, of all groups and without the bias."""
        return math.prod(self.geometry.size) * self.images.shape[-1]

    def _offsets(self) -> list[np.ndarray]:
        """Distance of the cells of a patch from its first cell, by axis."""
        pairs = zip(self.geometry.size, self.geometry.dilation, strict=True)
        return [rate * np.arange(size, dtype=np.int32) for size, rate in pairs]

    def _gather(
        self, row: tf.Tensor, valid: tf.Tensor, offsets: Sequence[Any]
    ) -> tf.Tensor:
        """Gather cells `(rows, offsets, channels)` at all tuples of offsets.

        Cells of rows that are not valid, and cells in the padding, are zero.
        """
        positions = []
        for axis in reversed(self._axes):
            positions.append(row % axis.outputs * axis.stride - axis.before)
            row //= axis.outputs
        index, inside = row[:, None], valid[:, None]
        for axis, position, offset in zip(
            self._axes, reversed(positions), offsets, strict=True
        ):
            cell = position[:, None] + offset
            is_inside = (cell >= 0) & (cell < axis.cells)
            cell = tf.clip_by_value(cell, 0, axis.cells - 1)
            index = index[..., None] * axis.cells + cell[:, None]
            index = tf.reshape(index, [tf.shape(row)[0], -1])
            inside = inside[..., None] & is_inside[:, None]
            inside = tf.reshape(inside, tf.shape(index))
        cells = tf.reshape(self.images, [-1, self.images.shape[-1]])
        cells = tf.cast(tf.gather(cells, index), self.dtype)
        # Select rather than multiply by 0: a padded row may contain NaN.
        return tf.where(inside[..., None], cells, tf.zeros([], self.dtype))

    def _by_example(self, values: tf.Tensor) -> tf.Tensor:
        """Reshape values of the rows to `(examples, positions, ...)`."""
        positions = self._num_rows // maximum(self.examples, 1)
        return tf.reshape(values, [self.examples, positions, *values.shape[1:]])

    def _with_weights(self, valid: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        """Set rows of weight 0 to invalid."""
        if self.weights is None:
            return valid
        return valid & (tf.gather(tf.reshape(self.weights, [-1]), row) > 0)

    def _features(self, cells: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
        """Reshape cells `(n, offsets, channels)` to rows; append the bias."""
        channels = self.images.shape[-1]
        offsets = self._num_elements // channels
        shape = [-1, self._num_elements]
        if self.groups:
            width = channels // self.groups
            cells = tf.reshape(cells, [-1, offsets, self.groups, width])
            cells = tf.transpose(cells, [0, 2, 1, 3])
            shape = [-1, self.groups, offsets * width]
        rows = tf.reshape(cells, shape)
        if not self.bias:
            return rows
        ones = tf.cast(valid, self.dtype)
        ones = tf.reshape(ones, [-1] + [1] * (len(shape) - 1))
        ones = tf.broadcast_to(ones, [*tf.unstack(tf.shape(rows))[:-1], 1])
        return tf.concat([rows, ones], -1)
