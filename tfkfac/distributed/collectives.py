"""Messages between any workers: collectives that are legal in `tf.cond`.

The collectives of `tf.distribute` work neither inside a `tf.cond` nor in
sub-groups, and factor steps and gradient-worker groups need both. These use
the raw operations with static keys. Every worker makes the same sequence of
calls, members of a group or not, so that all agree on the keys.

TensorFlow prunes an operation whose result nobody uses, and runs two that no
path connects in any order. A pruned collective hangs the other workers, and
only where a worker does not need its result, so that few models show it: so
each collective of a replica writes one variable, its ordering token, and what
is stateful stays in the graph, in branches and in nested functions too. NCCL
pairs the calls of devices by their order: there each collective also reads the
token before it starts, which makes it wait for those before it in the program.
On CPUs calls are paired by their keys, and waiting would cost up to 14 % of a
step.

TensorFlow 2.21 adds no bfloat16 on GPUs, so sums of it travel as float32 there.
"""

import dataclasses
import functools
import itertools
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.graphs import with_gradient
from tfkfac.compat.strategies import leave_note, read_note

# Small tensors travel together in buckets of at most this many bytes. A bucket
# waits for all that is in it: with 32 MB a step of 11 MB of gradients on two
# and four workers of one machine took 1.2 times as long.
BUCKET_BYTES = 4 * 2**20


class Communicator:
    """The collectives of one replica in one trace, among a group.

    Args:
        rank: Its number in the group.
        size: Number of members of the group.
        scope: Text that tells this user of collectives from all others in
            the same job. The same on every member.
        hint: Communication hint.
        one_process: True if members share a process, where TensorFlow's newer
            collectives do not work.
        token: The replica's ordering token, a float32 variable. Needed in
            graphs; None outside of them, where nothing is pruned.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        scope: str,
        hint: str = "auto",
        one_process: bool = False,
        token: tf.Variable | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._scope = scope
        self._hint = hint
        self._one_process = one_process
        self._token = token
        self._calls = 0

    def among(self, members: tuple[int, ...]) -> "Communicator":
        """The collectives of a part of the group, with this replica.

        In it, the members are numbered from 0 in the order of `members`.
        """
        return Communicator(
            members.index(self.rank),
            len(members),
            f"{self._scope} among {members}",
            self._hint,
            self._one_process,
            self._token,
        )

    def _launch(self, collective: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Makes a collective that is kept, on NCCL after those before it."""
        if self._token is None:
            return collective()
        # In a scope of its own: TensorFlow fuses reductions of one scope, also
        # those of which one needs the other, and then gives up on the graph.
        ordered = self._hint == "nccl"
        before = [self._token.read_value()] if ordered else []
        with tf.control_dependencies(before), tf.name_scope("collective"):
            result = collective()
        with tf.control_dependencies([result]):
            self._token.assign_add(0.0)
        return result

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], dtype: tf.DType | None = None
    ) -> list[tf.Tensor]:
        """Adds up tensors over the group.

        Args:
            tensors: Tensors of static shape, the same on every member.
            dtype: Dtype on the wire; None is each tensor's own. Sums are made
                in its `sum_dtype`.

        Returns:
            The sums, in the tensors' own dtype, the same bits everywhere.
        """
        if self.size == 1 or not tensors:
            return list(tensors)
        results: list[tf.Tensor] = []

        def wire(own: tf.DType) -> tf.DType:
            return sum_dtype(dtype or own, self._hint)

        for bucket in split_buckets(tensors, wire):
            total = self._among_all(
                "reduce",
                tf.raw_ops.CollectiveReduce,
                flatten(bucket, wire),
                merge_op="Add",
                final_op="Id",
                subdiv_offsets=[0],
            )
            results += unflatten(total, bucket)
        return results

    def _among_all(
        self,
        kind: str,
        operation: Callable[..., tf.Tensor],
        flat: tf.Tensor,
        **arguments: Any,
    ) -> tf.Tensor:
        """Makes a collective of all members of the group."""
        everyone = tuple(range(self.size))
        group, instance = self._keys(kind, everyone, 0, flat)
        return self._launch(
            lambda: operation(
                input=flat,
                group_size=self.size,
                group_key=group,
                instance_key=instance,
                communication_hint=self._hint,
                **arguments,
            )
        )

    def broadcast(
        self,
        tensors: Sequence[tf.Tensor] | None,
        like: Sequence[tf.TensorSpec],
        root: int,
        members: tuple[int, ...],
    ) -> list[tf.Tensor] | None:
        """Sends tensors from one member to some others.

        Args:
            tensors: The tensors; looked at on the root only.
            like: Their shapes and dtypes.
            root: The member that sends.
            members: Those that send and receive, in ascending order.

        Returns:
            The tensors on those members; None on others.
        """
        results: list[tf.Tensor] = []
        rest = iter(tensors or ())
        for bucket in split_buckets(like):
            mine = None
            if self.rank == root:
                mine = flatten(list(itertools.islice(rest, len(bucket))))
            size = sum(math.prod(spec.shape) for spec in bucket)
            spec = tf.TensorSpec([size], bucket[0].dtype)
            flat = self._broadcast_flat(mine, spec, root, members)
            if flat is not None:
                results += unflatten(flat, bucket)
        return results if self.rank in members else None

    def _broadcast_flat(
        self,
        flat: tf.Tensor | None,
        spec: tf.TensorSpec,
        root: int,
        members: tuple[int, ...],
    ) -> tf.Tensor | None:
        group, instance = self._keys("broadcast", members, root, spec)
        if self.rank not in members:
            return None
        # The broadcast operations do not know bfloat16; its bits travel as
        # float16's.
        is_carried = spec.dtype == tf.bfloat16
        arguments = {
            "group_size": len(members),
            "group_key": group,
            "instance_key": instance,
            "shape": list(spec.shape),
            "communication_hint": self._hint,
        }
        if self.rank == root:
            sent = tf.bitcast(flat, tf.float16) if is_carried else flat
            send = tf.raw_ops.CollectiveBcastSend
            self._launch(functools.partial(send, input=sent, **arguments))
            return flat
        arguments["T"] = tf.float16 if is_carried else spec.dtype
        receive = tf.raw_ops.CollectiveBcastRecv
        received = self._launch(functools.partial(receive, **arguments))
        return tf.bitcast(received, spec.dtype) if is_carried else received

    def all_come(self, meeting: str, moment: str, seconds: float) -> bool:
        """True on all members if all come to a meeting, or False on all.

        No collective: if one does not come within some seconds, or from
        another moment, the others go on. The name of a meeting is used once.
        """
        key = f"{self._scope} {meeting}"
        leave_note(f"{key}/{self.rank}", moment)
        end = time.monotonic() + seconds
        come = all(
            read_note(f"{key}/{rank}", end - time.monotonic()) == moment
            for rank in range(self.size)
        )
        # Who is the first to know decides for all.
        leave_note(f"{key}/word", str(come))
        return read_note(f"{key}/word", seconds) == str(True)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stacks a tensor of static shape from all members, by rank."""
        if self.size == 1:
            return tensor[None]
        flat = tf.reshape(tensor, [1, -1])
        gathered = self._among_all(
            "gather",
            tf.raw_ops.CollectiveGather,
            flat,
            shape=[self.size, flat.shape[1]],
        )
        return tf.reshape(gathered, [self.size, *tensor.shape])

    def reduce_scatter(self, parts: tf.Tensor) -> tf.Tensor:
        """Adds up tensors of static shape; each member gets its part.

        They are `(size, ...)`, a part for each member.
        """
        if self._one_process:
            (total,) = self.all_reduce([parts])
            return total[self.rank]
        return tf.reduce_sum(self.all_to_all(parts), 0)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Exchanges parts: part `i` of member `j` becomes part `j` of `i`."""
        if self.size == 1:
            return tensor
        if self._one_process:
            return self.all_gather(tensor)[:, self.rank]
        received = self._among_all(
            "all to all",
            tf.raw_ops.CollectiveAllToAllV2,
            tf.reshape(tensor, [self.size, -1]),
            ordering_token=[],
        )
        return tf.reshape(received, tensor.shape)

    def _keys(
        self,
        kind: str,
        members: tuple[int, ...],
        root: int,
        tensor: tf.Tensor | tf.TensorSpec,
    ) -> tuple[int, int]:
        """Group and instance key of the next call.

        They depend on the message, not on the number of traces, so workers
        whose traces differ in number still agree.
        """
        self._calls += 1
        group = stable_key(self._scope, members)
        shape = tuple(tensor.shape)
        what = (kind, members, root, shape, tensor.dtype.name, self._calls)
        return group, stable_key(self._scope, what)


def differentiable_sum(group: Communicator, tensor: tf.Tensor) -> tf.Tensor:
    """Sum over a group, differentiable any number of times."""

    def total(x: tf.Tensor) -> tf.Tensor:
        return with_gradient(lambda t: group.all_reduce([t])[0], x, total)

    return total(tensor)


def stable_key(*parts: object) -> int:
    """A key in a range that TensorFlow's own counters never reach."""
    text = repr(parts).encode()
    return 2**30 + zlib.crc32(text) % 2**30


def sum_dtype(dtype: tf.DType, hint: str) -> tf.DType:
    """Dtype in which tensors of a dtype are added up over workers."""
    return tf.float32 if (dtype, hint) == (tf.bfloat16, "nccl") else dtype


# The dtype on the wire of tensors of a dtype.
WireDtype = Callable[[tf.DType], tf.DType]


def _own(dtype: tf.DType) -> tf.DType:
    return dtype


def split_buckets(
    tensors: Sequence[tf.Tensor] | Sequence[tf.TensorSpec],
    wire: WireDtype = _own,
) -> list[list[tf.Tensor]]:
    """Groups tensors, in order, into buckets of one wire dtype and size."""
    buckets: list[list[tf.Tensor]] = []
    filled, last = 0, None
    for tensor in tensors:
        dtype = wire(tensor.dtype)
        size = math.prod(tensor.shape) * dtype.size
        if last != dtype or filled + size > BUCKET_BYTES:
            buckets.append([])
            filled, last = 0, dtype
        buckets[-1].append(tensor)
        filled += size
    return buckets


def flatten(tensors: Sequence[tf.Tensor], wire: WireDtype = _own) -> tf.Tensor:
    """Joins tensors of one wire dtype into a vector of it."""
    parts = [tf.cast(tf.reshape(t, [-1]), wire(t.dtype)) for t in tensors]
    return tf.concat(parts, 0)


def unflatten(
    flat: tf.Tensor, like: Sequence[tf.Tensor | tf.TensorSpec]
) -> list[tf.Tensor]:
    """Inverse of `flatten`."""
    sizes = [math.prod(t.shape) for t in like]
    parts = tf.split(flat, sizes)
    return [
        tf.cast(tf.reshape(part, t.shape), t.dtype)
        for part, t in zip(parts, like, strict=True)
    ]


# ------------------------------------------------------- messages of items
@dataclasses.dataclass(frozen=True)
class Item:
    """A tensor of a layer that one worker has and others need.

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
    """The items that this worker needs, by layer and name.

    Args:
        communicator: This worker's collectives.
        items: All items, the same list on every worker.
        value_of: Gives the value of an item whose root is this worker.
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
    """Bytes of the gradients of some variables, as they are added up."""
    return sum(
        v.value.shape.num_elements()
        * sum_dtype(tf.as_dtype(v.dtype), hint).size
        for v in variables
    )
