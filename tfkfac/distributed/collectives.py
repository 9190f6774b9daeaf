"""Collectives between subsets of workers that are legal inside `tf.cond`.

The collectives of `tf.distribute` work neither inside a `tf.cond`, which factor
updates need, nor in sub-groups, which gradient-worker groups need. This module
uses raw operations with static keys. Every worker makes the same sequence of
calls, also for groups without it, so that all workers compute the same keys.

TensorFlow prunes operations with unused results, and runs unconnected
operations in any order. A pruned collective hangs the other workers. Therefore
each collective of a replica also writes a variable, the ordering token.
TensorFlow keeps stateful operations, also in branches and nested functions.
NCCL matches the calls of devices by their order: there each collective also
reads the token first, and so waits for the previous collective. On CPUs
calls are matched by key, and waiting would cost up to 14 % of a step.

TensorFlow 2.21 cannot sum bfloat16 on GPUs, so sums use float32 there.
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

from tfkfac.compat.coordination import get_text, set_text
from tfkfac.compat.graphs import with_gradient

# Maximal size in bytes of a bucket of small tensors that are sent together. A
# bucket waits for all its tensors: with 32 MB, a step with 11 MB of gradients
# on two and four workers of one machine took 1.2 times as long.
BUCKET_BYTES = 4 * 2**20


@dataclasses.dataclass(eq=False, repr=False)
class Communicator:
    """Collectives that one replica runs in a group, for one traced graph."""

    rank: int  # index of this replica in the group
    size: int  # number of members of the group
    scope: str  # unique name in the job, equal on all members
    hint: str = "auto"  # "nccl" or "ring" on GPUs
    # True if all members share a process, where TensorFlow's newer collectives
    # do not work.
    one_process: bool = False
    token: tf.Variable | None = None  # ordering token; None only in eager mode
    _calls: int = dataclasses.field(default=0, init=False)

    def among(self, members: tuple[int, ...]) -> "Communicator":
        """Return the communicator of a sub-group, ranked as in `members`."""
        return dataclasses.replace(
            self,
            rank=members.index(self.rank),
            size=len(members),
            scope=f"{self.scope} among {members}",
        )

    def _launch(self, collective: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Add a collective that is never pruned; with NCCL, in call order."""
        if self.token is None:
            return collective()
        # Use a name scope per collective: in a common scope, TensorFlow fuses
        # reductions even if they depend on each other, and then fails.
        dependencies = [self.token.read_value()] if self.hint == "nccl" else []
        with tf.control_dependencies(dependencies), tf.name_scope("collective"):
            result = collective()
        with tf.control_dependencies([result]):
            self.token.assign_add(0.0)
        return result

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], dtype: tf.DType | None = None
    ) -> list[tf.Tensor]:
        """Sum tensors of static shape; bitwise equal results on all members.

        `dtype` is the dtype of messages, by default each tensor's. The sums
        have the dtypes of the tensors.
        """
        if self.size == 1 or not tensors:
            return list(tensors)
        sent = [
            tf.cast(tensor, sum_dtype(dtype or tensor.dtype, self.hint))
            for tensor in tensors
        ]
        results: list[tf.Tensor] = []
        remaining = iter(tensors)
        for bucket in split_buckets(sent):
            total = self._call_all(
                "reduce",
                tf.raw_ops.CollectiveReduce,
                flatten(bucket),
                merge_op="Add",
                final_op="Id",
                subdiv_offsets=[0],
            )
            like = list(itertools.islice(remaining, len(bucket)))
            results += unflatten(total, like)
        return results

    def _call_all(
        self,
        name: str,
        operation: Callable[..., tf.Tensor],
        flat: tf.Tensor,
        **arguments: Any,
    ) -> tf.Tensor:
        """Call a collective operation on all members of the group."""
        group, instance = self._keys(name, tuple(range(self.size)), 0, flat)
        return self._launch(
            lambda: operation(
                input=flat,
                group_size=self.size,
                group_key=group,
                instance_key=instance,
                communication_hint=self.hint,
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
        """Send tensors from the rank `root` to `members`, which include it.

        `tensors` is used on the root only. `members` are ranks in ascending
        order; other replicas get None.
        """
        results: list[tf.Tensor] = []
        remaining = iter(tensors or ())
        for bucket in split_buckets(like):
            size = sum(math.prod(spec.shape) for spec in bucket)
            spec = tf.TensorSpec([size], bucket[0].dtype)
            group, instance = self._keys("broadcast", members, root, spec)
            if self.rank not in members:
                continue
            # Send bfloat16 as float16 with the same bits: the broadcast
            # operations do not support bfloat16.
            is_bitcast = spec.dtype == tf.bfloat16
            arguments = {
                "group_size": len(members),
                "group_key": group,
                "instance_key": instance,
                "shape": [size],
                "communication_hint": self.hint,
            }
            if self.rank == root:
                flat = flatten(list(itertools.islice(remaining, len(bucket))))
                sent = tf.bitcast(flat, tf.float16) if is_bitcast else flat
                send = tf.raw_ops.CollectiveBcastSend
                self._launch(functools.partial(send, input=sent, **arguments))
            else:
                arguments["T"] = tf.float16 if is_bitcast else spec.dtype
                receive = tf.raw_ops.CollectiveBcastRecv
                flat = self._launch(functools.partial(receive, **arguments))
                flat = tf.bitcast(flat, spec.dtype) if is_bitcast else flat
            results += unflatten(flat, bucket)
        return results if self.rank in members else None

    def all_come(self, meeting: str, moment: str, seconds: float) -> bool:
        """Wait for all members; return True, on all members, if all come.

        `moment` is the training position, which must be equal on all members.
        Each name `meeting` can be used only once.
        """
        # Not a collective: if a member is missing, the others continue.
        key = f"{self.scope} {meeting}"
        try:
            set_text(f"{key}/{self.rank}", moment)
            deadline = time.monotonic() + seconds
            complete = all(
                get_text(f"{key}/{rank}", deadline - time.monotonic()) == moment
                for rank in range(self.size)
            )
            # Only the first stored result counts, so all members return it.
            set_text(f"{key}/result", str(complete))
            return get_text(f"{key}/result", seconds) == str(True)
        except tf.errors.OpError:  # the first member is gone
            return False

    def differentiable_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a tensor over the group, with derivatives of any order."""
        return with_gradient(
            lambda t: self.all_reduce([t])[0], tensor, self.differentiable_sum
        )

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stack a tensor of static shape from all members, by rank."""
        if self.size == 1:
            return tensor[None]
        flat = tf.reshape(tensor, [1, -1])
        gathered = self._call_all(
            "gather",
            tf.raw_ops.CollectiveGather,
            flat,
            shape=[self.size, flat.shape[1]],
        )
        return tf.reshape(gathered, [self.size, *tensor.shape])

    def reduce_scatter(self, parts: tf.Tensor) -> tf.Tensor:
        """Sum tensors `(size, ...)` of static shape; member i gets row i."""
        if self.one_process:
            (total,) = self.all_reduce([parts])
            return total[self.rank]
        return tf.reduce_sum(self.all_to_all(parts), 0)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Exchange rows: row i on member j becomes row j on member i."""
        if self.size == 1:
            return tensor
        if self.one_process:
            return self.all_gather(tensor)[:, self.rank]
        received = self._call_all(
            "all to all",
            tf.raw_ops.CollectiveAllToAllV2,
            tf.reshape(tensor, [self.size, -1]),
            ordering_token=[],
        )
        return tf.reshape(received, tensor.shape)

    def _keys(
        self,
        name: str,
        members: tuple[int, ...],
        root: int,
        tensor: tf.Tensor | tf.TensorSpec,
    ) -> tuple[int, int]:
        """Return the group key and the instance key of the next collective."""
        # The keys do not depend on the number of traces, which may differ
        # between workers.
        self._calls += 1
        group = stable_key(self.scope, members)
        shape = tuple(tensor.shape)
        message = (name, members, root, shape, tensor.dtype.name, self._calls)
        return group, stable_key(self.scope, message)


def stable_key(*parts: object) -> int:
    """Hash values to a key of at least 2^30, above TensorFlow's own keys."""
    return 2**30 + zlib.crc32(repr(parts).encode()) % 2**30


def sum_dtype(dtype: tf.DType, hint: str) -> tf.DType:
    """Return the dtype in which collectives sum tensors of `dtype`."""
    # TensorFlow cannot sum bfloat16 on GPUs, where `hint` is not "auto".
    return tf.float32 if dtype == tf.bfloat16 and hint != "auto" else dtype


def split_buckets(
    tensors: Sequence[tf.Tensor] | Sequence[tf.TensorSpec],
) -> list[list[tf.Tensor]]:
    """Split tensors into buckets of up to `BUCKET_BYTES` and one dtype."""
    buckets: list[list[tf.Tensor]] = []
    bucket_bytes, bucket_dtype = 0, None
    for tensor in tensors:
        dtype = tensor.dtype
        size = math.prod(tensor.shape) * dtype.size
        if bucket_dtype != dtype or bucket_bytes + size > BUCKET_BYTES:
            buckets.append([])
            bucket_bytes, bucket_dtype = 0, dtype
        buckets[-1].append(tensor)
        bucket_bytes += size
    return buckets


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate tensors of one dtype to a vector."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)


def unflatten(
    flat: tf.Tensor, like: Sequence[tf.Tensor | tf.TensorSpec]
) -> list[tf.Tensor]:
    """Split a vector of `flatten` into tensors of given shapes and dtypes."""
    vectors = tf.split(flat, [math.prod(t.shape) for t in like])
    return [
        tf.cast(tf.reshape(vector, t.shape), t.dtype)
        for vector, t in zip(vectors, like, strict=True)
    ]


# ------------------------------------------------------- messages of items
@dataclasses.dataclass(frozen=True)
class Item:
    """A tensor of a layer that one worker sends to others."""

    layer: int
    name: str
    spec: tf.TensorSpec  # shape and dtype in messages
    root: int  # rank of the sender
    members: tuple[int, ...]  # the sender and the receivers, ascending


Route = tuple[int, tuple[int, ...]]  # rank of the sender, and all members


def bundles(items: Sequence[Item]) -> dict[Route, list[Item]]:
    """Group items by sender and members, in the order of the items."""
    groups: dict[Route, list[Item]] = {}
    for item in items:
        if len(item.members) > 1:
            groups.setdefault((item.root, item.members), []).append(item)
    return groups


def all_reduce_bytes(size: int, workers: int) -> int:
    """Bytes that each worker receives in a ring all-reduce of `size` bytes."""
    return round(2 * size * (workers - 1) / workers)


def broadcast_items(
    communicator: Communicator,
    items: Sequence[Item],
    value_of: Callable[[Item], tf.Tensor],
) -> dict[tuple[int, str], tf.Tensor]:
    """Broadcast items; return the values that this worker needs.

    All workers pass the same list; `value_of` returns a value to send.
    """
    rank = communicator.rank
    values = {
        (item.layer, item.name): value_of(item)
        for item in items
        if item.root == rank and rank in item.members
    }
    for (root, members), bundle in bundles(items).items():
        sent = None
        if root == rank:
            sent = [values[item.layer, item.name] for item in bundle]
        specs = [item.spec for item in bundle]
        with tf.name_scope(scope([item.layer for item in bundle])):
            received = communicator.broadcast(sent, specs, root, members)
        for item, value in zip(bundle, received or (), strict=False):
            values[item.layer, item.name] = value
    return values


def scope(layers: Sequence[int]) -> str:
    """Return the name scope, shown in profiles, of a message about layers."""
    return f"layers_{min(layers)}_{max(layers)}"


def gradient_bytes(
    variables: Sequence[keras.Variable], hint: str = "auto"
) -> int:
    """Bytes of the gradients of variables in the dtypes of the all-reduce."""
    return sum(
        v.value.shape.num_elements()
        * sum_dtype(tf.as_dtype(v.dtype), hint).size
        for v in variables
    )
