"""What moves between workers, and how much of it.

A `Plan` is the same on every worker. It knows nothing of layers: items have a
name, a shape and a place where they are made.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfkfac.distributed.assignment import LayerPlan
from tfkfac.distributed.collectives import Communicator

Kinds = dict[str, dict[str, int]]


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement of all layers on the workers.

    Attributes:
        mode: The distribution mode.
        workers: Number of workers.
        layers: Who does what for each layer.
    """

    mode: str
    workers: int
    layers: tuple[LayerPlan, ...]

    def owns(self, rank: int, layer: int) -> tuple[str, ...]:
        """Names of the factors of a layer that a worker keeps."""
        return self.layers[layer].owned_by(rank)

    def preconditions(self, rank: int, layer: int) -> bool:
        """Whether a worker is a gradient worker of a layer."""
        return rank in self.layers[layer].gradient_workers

    def observes(self, rank: int, layer: int) -> bool:
        """Whether a worker's batch goes into the factors of a layer."""
        return self.mode != "dp_kfac" or bool(self.owns(rank, layer))

    @property
    def reduces_factors(self) -> bool:
        """Whether statistics are added up over the workers."""
        return self.workers > 1 and self.mode != "dp_kfac"

    def decomposition_group(self, layer: int, factor: str) -> tuple[int, ...]:
        """The owner of a factor and all that need its decomposition."""
        plan = self.layers[layer]
        return tuple(sorted({plan.owners[factor], *plan.gradient_workers}))

    def gradient_groups(self, layer: int) -> list[tuple[int, tuple[int, ...]]]:
        """Each gradient worker that sends, and its group."""
        receivers = self.layers[layer].receivers
        return [
            (worker, tuple(sorted((worker, *others))))
            for worker, others in receivers.items()
            if others
        ]


def bundles(
    items: Sequence[Item],
) -> dict[tuple[int, tuple[int, ...]], list[Item]]:
    """Items with the same sender and receivers, in a fixed order."""
    groups: dict[tuple[int, tuple[int, ...]], list[Item]] = {}
    for item in items:
        if len(item.members) > 1:
            groups.setdefault((item.root, item.members), []).append(item)
    return groups


def received_bytes(items: Sequence[Item], rank: int) -> int:
    """Bytes that a worker receives when the items are broadcast."""
    return sum(
        item.bytes
        for item in items
        if rank in item.members and rank != item.root
    )


def all_reduce_bytes(size: int, workers: int) -> int:
    """Bytes that each worker receives in a ring all-reduce of `size` bytes."""
    return round(2 * size * (workers - 1) / workers)


def step_bytes(
    gradients: int, factors: int, decompositions: int, preconditioned: int
) -> Kinds:
    """Traffic of each kind of step, by what is sent."""

    def kind(with_factors: bool, with_decompositions: bool) -> dict[str, int]:
        return {
            "gradients": gradients,
            "factors": factors * with_factors,
            "decompositions": decompositions * with_decompositions,
            "preconditioned_gradients": preconditioned,
        }

    return {
        "plain": kind(False, False),
        "factor": kind(True, False),
        "inverse": kind(False, True),
    }


def broadcast_items(
    communicator: Communicator,
    items: Sequence[Item],
    value_of: Callable[[Item], tf.Tensor],
) -> dict[tuple[int, str], tf.Tensor]:
    """Sends every item from its root to its members, bundled.

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
        received = communicator.broadcast(mine, specs, root, members)
        for item, value in zip(bundle, received or (), strict=False):
            values[item.layer, item.name] = value
    return values
