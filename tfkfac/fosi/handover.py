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
    """Sends each worker its part of the Ritz vectors, and all Ritz values.

    On an accelerator it takes the slices that this has, and returns None; on a
    worker it returns the values and its part of V^T.
    """
    dtype, rank = layout.geometry.dtype, everyone.rank
    first = roles.accelerators[0]
    values = everyone.broadcast(
        None if spectrum is None else [spectrum.values],
        [tf.TensorSpec([layout.geometry.directions], dtype)],
        first,
        (*roles.workers, first),
    )
    found: list[tf.Tensor] = []
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
            found += received
    if values is None or not roles.trains(rank):
        return None
    part = tf.concat(found, 1) if found else tf.zeros([0, 0], dtype)
    missing = [
        [0, size - have]
        for size, have in zip(layout.shape, part.shape, strict=True)
    ]
    return values[0], tf.pad(part, missing)


def pieces(
    layout: Layout, roles: Roles
) -> Iterator[tuple[int, int, slice, slice, int]]:
    """The parts that each accelerator sends to each worker.

    Worker, accelerator, directions, elements, start of the accelerator's slice.
    """
    shards = layout.geometry.slices(len(roles.accelerators))
    for position, worker in enumerate(roles.workers):
        rows, elements = layout.ranges(position)
        for index, accelerator in enumerate(roles.accelerators):
            mine = shards.range(index)
            start = max(elements.start, mine.start)
            stop = min(elements.stop, mine.stop)
            if start < stop and rows.start < rows.stop:
                yield worker, accelerator, rows, slice(start, stop), mine.start


def piece_bytes(layout: Layout, roles: Roles, rank: int) -> int:
    """Bytes that a replica receives in a hand-over."""
    item = layout.geometry.dtype.size
    count = layout.geometry.directions if roles.trains(rank) else 0
    for worker, _, rows, elements, _ in pieces(layout, roles):
        if worker == rank:
            count += (rows.stop - rows.start) * (elements.stop - elements.start)
    return count * item


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model, those of one wire type after the other."""
    return sorted(
        [*model.trainable_variables, *model.non_trainable_variables],
        key=lambda v: str(wire_type(v)),
    )


def wire_type(variable: keras.Variable) -> tf.DType:
    """The dtype in which a variable travels; not all have a collective."""
    dtype = tf.as_dtype(variable.dtype)
    if dtype.is_floating:
        return dtype
    return tf.int64


def tap_moments(
    layer: keras.layers.Layer, total: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """Gives a layer another sum of its moments in training steps."""

    def moments(below: Callable[..., Any], /, *args: Any) -> Any:
        if not capturing():
            return below(*args)
        with exact_second_derivatives(total):
            return below(*args)

    replace_moments(layer, moments)


class FinalUpdate(Slots):
    """A Newton step with all gradients of an interval.

    With weights c at the beginning of the interval, `o` the way that the inner
    optimizer went in it, and `p` the sum of its gradients, the weights become
    `c - alpha V (V^T p / |lambda|) + o - V V^T o`: what the inner optimizer
    moved in the directions is taken back. No file has it: after loading, the
    interval starts again.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("final_update")
        sizes = [geometry.size], geometry.dtype
        self.start = self.slot("start", *sizes)
        self.gradient_sum = self.slot("gradient_sum", *sizes)

    @staticmethod
    def moving_bytes(layout: Layout) -> int:
        """Bytes that a worker receives in `move`."""
        return 2 * layout.coefficients_bytes + layout.combine_bytes

    def begin(self, weights: tf.Tensor) -> None:
        """Begins an interval at some weights."""
        self.start.assign(weights)
        self.gradient_sum.assign(tf.zeros_like(weights))

    def move(
        self,
        weights: tf.Tensor,
        subspace: Subspace,
        alpha: tf.Tensor,
        group: Communicator,
    ) -> tf.Tensor:
        """Returns what is added to the weights at the end of the interval."""
        total = tf.convert_to_tensor(self.gradient_sum)
        inside = subspace.coefficients(total, group)
        moved = subspace.coefficients(weights - self.start, group)
        newton = alpha * inside * subspace.inverse_curvature(group.rank)
        return -subspace.combine([newton + moved], group)
