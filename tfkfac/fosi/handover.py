"""What travels between accelerators and workers: directions, weights."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import Roles
from tfkfac.fosi.estimation import Spectrum
from tfkfac.fosi.layouts import Layout


def hand_over(
    spectrum: Spectrum | None,
    layout: Layout,
    roles: Roles,
    everyone: Communicator,
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Sends each worker its part of the Ritz vectors, and all Ritz values.

    Args:
        spectrum: On an accelerator, what it found (slices).
        layout: Which part each worker keeps.
        roles: Who is what.
        everyone: The collectives of the whole job.

    Returns:
        On a worker, the values and its part of V^T; None on accelerators.
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
    """What each accelerator sends to each worker.

    Yields:
        Worker, accelerator, directions, elements, and where the accelerator's
        slice begins.
    """
    shards = layout.geometry.slices(len(roles.accelerators))
    for position, worker in enumerate(roles.workers):
        rows, elements = layout.part(position)
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
