"""Messages between accelerators and workers, and the published final update."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import capturing
from tfkfac.compat.graphs import exact_second_derivatives
from tfkfac.compat.overrides import replace_moments
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import Roles
from tfkfac.fosi.estimation import Spectrum
from tfkfac.fosi.layouts import Geometry, Layout
from tfkfac.fosi.subspace import Subspace
from tfkfac.saving.slots import Slots


def hand_over(
    spectrum: Spectrum | None,
    layout: Layout,
    roles: Roles,
    everyone: Communicator,
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Send each worker its block of V^T, and all Ritz values.

    On an accelerator, `spectrum` has its slices, and None is returned. On a
    worker, returns the Ritz values and the block.
    """
    dtype, rank = layout.geometry.dtype, everyone.rank
    first = roles.accelerators[0]
    values = everyone.broadcast(
        None if spectrum is None else [spectrum.values],
        [tf.TensorSpec([layout.geometry.directions], dtype)],
        first,
        (*roles.workers, first),
    )
    received_pieces: list[tf.Tensor] = []
    for worker, accelerator, rows, elements, start in pieces(layout, roles):
        shape = [rows.stop - rows.start, elements.stop - elements.start]
        piece = None
        if spectrum is not None and rank == accelerator:
            local = slice(elements.start - start, elements.stop - start)
            piece = [spectrum.rows[rows, local]]
        received = everyone.broadcast(
            piece,
            [tf.TensorSpec(shape, dtype)],
            accelerator,
            (worker, accelerator),
        )
        if rank == worker and received is not None:
            received_pieces += received
    if values is None or not roles.trains(rank):
        return None
    block = tf.zeros([0, 0], dtype)
    if received_pieces:
        block = tf.concat(received_pieces, 1)
    padding = [
        [0, size - present]
        for size, present in zip(layout.shape, block.shape, strict=True)
    ]
    return values[0], tf.pad(block, padding)


def pieces(
    layout: Layout, roles: Roles
) -> Iterator[tuple[int, int, slice, slice, int]]:
    """Yield the pieces of V^T that accelerators send to workers.

    Yields (worker, accelerator, directions, elements, first element on the
    accelerator).
    """
    shards = layout.geometry.slices(len(roles.accelerators))
    for position, worker in enumerate(roles.workers):
        rows, elements = layout.ranges(position)
        for index, accelerator in enumerate(roles.accelerators):
            sent = shards.range(index)
            start = max(elements.start, sent.start)
            stop = min(elements.stop, sent.stop)
            if start < stop and rows.start < rows.stop:
                yield worker, accelerator, rows, slice(start, stop), sent.start


def piece_bytes(layout: Layout, roles: Roles, rank: int) -> int:
    """Bytes that a replica receives in `hand_over`."""
    item = layout.geometry.dtype.size
    count = layout.geometry.directions if roles.trains(rank) else 0
    for worker, _, rows, elements, _ in pieces(layout, roles):
        if worker == rank:
            count += (rows.stop - rows.start) * (elements.stop - elements.start)
    return count * item


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model, grouped by wire dtype."""
    return sorted(
        [*model.trainable_variables, *model.non_trainable_variables],
        key=lambda v: str(wire_type(v)),
    )


def wire_type(variable: keras.Variable) -> tf.DType:
    """Dtype in which a variable is sent: its own if floating, else int64."""
    dtype = tf.as_dtype(variable.dtype)
    if dtype.is_floating:
        return dtype
    return tf.int64


def tap_moments(
    layer: keras.layers.Layer, total: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """Sum the moments of a layer by `total` in training steps."""

    def moments(original: Callable[..., Any], /, *args: Any) -> Any:
        if not capturing():
            return original(*args)
        with exact_second_derivatives(total):
            return original(*args)

    replace_moments(layer, moments)


class FinalUpdate(Slots):
    """A Newton step with the sum of an interval's gradients (DHO2, eq. 17).

    For weights w at the start of the interval, the inner optimizer's total
    change d and the sum p of its gradients, the new weights are

    `w + d - V V^T d - alpha V (V^T p / |lambda|)`.

    This state is not saved: after loading, the interval starts again.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("final_update")
        sizes = [geometry.size], geometry.dtype
        self.start = self.slot("start", *sizes)
        self.gradient_sum = self.slot("gradient_sum", *sizes)

    @staticmethod
    def change_bytes(layout: Layout) -> int:
        """Bytes that a worker receives in `change`."""
        return 2 * layout.coefficients_bytes + layout.combine_bytes

    def begin(self, weights: tf.Tensor) -> None:
        """Begin an interval at the given weights."""
        self.start.assign(weights)
        self.gradient_sum.assign(tf.zeros_like(weights))

    def change(
        self,
        weights: tf.Tensor,
        subspace: Subspace,
        alpha: tf.Tensor,
        group: Communicator,
    ) -> tf.Tensor:
        """Return the correction of the weights at the end of the interval."""
        total = tf.convert_to_tensor(self.gradient_sum)
        coefficients = subspace.coefficients(total, group)
        inner = subspace.coefficients(weights - self.start, group)
        newton = alpha * coefficients * subspace.inverse_curvature(group.rank)
        return -subspace.combine([newton + inner], group)
