"""The form of tensors between workers, and their messages.

A `Plan` is the same on every worker. Nothing here knows of layers: items have
a name, a shape and a place where they are made.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import keras
import tensorflow as tf

from tfkfac.distributed.collectives import (
    Communicator,
    split_buckets,
    sum_dtype,
)


class Packable(Protocol):
    """A tensor's layout, which knows what of it has to travel."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of what `pack` returns."""

    def pack(self, value: tf.Tensor) -> tf.Tensor:
        """Leaves out what a receiver can tell from the rest."""

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """The form in which tensors travel.

    Attributes:
        symmetric: True if symmetric matrices travel as triangles.
        factor_dtype: Dtype of statistics; None is their own.
        inverse_dtype: Dtype of decompositions, kept or sent; None is their
            own.
    """

    symmetric: bool = False
    factor_dtype: tf.DType | None = None
    inverse_dtype: tf.DType | None = None

    def shape(self, part: Packable) -> tuple[int, ...]:
        """Shape of a tensor on the wire."""
        return part.packed_shape if self.symmetric else part.shape

    def pack(self, part: Packable, value: tf.Tensor) -> tf.Tensor:
        """A tensor as it travels."""
        return part.pack(value) if self.symmetric else value

    def unpack(self, part: Packable, value: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return part.unpack(value) if self.symmetric else value


@dataclasses.dataclass(frozen=True)
class Item:
    """A tensor that one worker has and others need.

    Attributes:
        layer: Position of the layer.
        name: Name of the tensor within the layer.
        spec: Shape and dtype on the wire.
        root: The worker that has it.
        members: All that need it, the root among them, in ascending order.
    """

    layer: int
    name: str
    spec: tf.TensorSpec
    root: int
    members: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.spec.shape) * self.spec.dtype.size


def bundles(
    items: Sequence[Item],
) -> dict[tuple[int, tuple[int, ...]], list[Item]]:
    """Items with the same sender and receivers, in a fixed order."""
    groups: dict[tuple[int, tuple[int, ...]], list[Item]] = {}
    for item in items:
        if len(item.members) > 1:
            groups.setdefault((item.root, item.members), []).append(item)
    return groups


def rounds(items: Sequence[Item]) -> list[list[Item]]:
    """Items by the place of their message among those of its sender.

    The first messages of all senders are the first round. A round can be on
    its way while the senders make the next.
    """
    found: list[list[Item]] = []
    for bundle in bundles(items).values():
        rest = iter(bundle)
        messages = split_buckets([item.spec for item in bundle])
        for place, message in enumerate(messages):
            if place == len(found):
                found.append([])
            found[place] += itertools.islice(rest, len(message))
    return found


def all_reduce_bytes(size: int, workers: int) -> int:
    """Bytes that each worker receives in a ring all-reduce of `size` bytes."""
    return round(2 * size * (workers - 1) / workers)


def broadcast_items(
    communicator: Communicator,
    items: Sequence[Item],
    value_of: Callable[[Item], tf.Tensor],
) -> dict[tuple[int, str], tf.Tensor]:
    """The items that this worker needs, after all roots have sent theirs.

    Args:
        communicator: This worker's collectives.
        items: All items, the same list on every worker.
        value_of: Gives the value of an item whose root is this worker.

    Returns:
        The items this worker needs, by layer and name.
    """
    rank = communicator.rank
    values = {
        (item.layer, item.name): value_of(item)
        for item in items
        if item.root == rank and rank in item.members
    }
    for (root, members), bundle in bundles(items).items():
        mine = None
        if root == rank:
            mine = [values[item.layer, item.name] for item in bundle]
        specs = [item.spec for item in bundle]
        with tf.name_scope(scope([item.layer for item in bundle])):
            received = communicator.broadcast(mine, specs, root, members)
        for item, value in zip(bundle, received or (), strict=False):
            values[item.layer, item.name] = value
    return values


def scope(layers: Sequence[int]) -> str:
    """The name scope of a message of some layers, for profiles of a step."""
    return f"layers_{min(layers)}_{max(layers)}"


def gradient_bytes(
    variables: Sequence[keras.Variable], hint: str = "auto"
) -> int:
    """Bytes of the gradients of some variables, as they are added up.

    Args:
        variables: The variables.
        hint: Communication hint of their sum.
    """
    return sum(
        v.value.shape.num_elements()
        * sum_dtype(tf.as_dtype(v.dtype), hint).size
        for v in variables
    )
