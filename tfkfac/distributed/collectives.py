"""Collectives among any workers, legal inside `tf.cond`.

The collectives of `tf.distribute` work neither inside a `tf.cond` nor in
sub-groups, and factor steps and gradient-worker groups need both. These use
the raw operations with static keys. Every worker makes the same sequence of
calls, members of a group or not, so that all agree on the keys.
"""

import math
import zlib
from collections.abc import Sequence

import tensorflow as tf

# Small tensors travel together in buckets of at most this many bytes.
BUCKET_BYTES = 32 * 2**20


class Communicator:
    """The collectives of one worker in one trace.

    Args:
        rank: This worker.
        workers: Number of workers.
        scope: Text that tells this user of collectives from all others in
            the same job. The same on every worker.
        hint: Communication hint.
        one_process: Whether workers share a process, where TensorFlow's
            newer collectives do not work.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        scope: str,
        hint: str = "auto",
        one_process: bool = False,
    ) -> None:
        self.rank = rank
        self.workers = workers
        self._scope = scope
        self._hint = hint
        self._one_process = one_process
        self._calls = 0
        self._outputs: list[tf.Tensor] = []

    def among(self, members: tuple[int, ...]) -> "Communicator":
        """Returns the collectives of a group, which this worker is in.

        In it, the workers are numbered from 0 in the order of `members`.
        """
        return Communicator(
            members.index(self.rank),
            len(members),
            f"{self._scope} among {members}",
            self._hint,
            self._one_process,
        )

    def outputs(self) -> list[tf.Tensor]:
        """Returns the outputs of the collectives since the last call.

        TensorFlow prunes a collective whose result a worker does not use, and
        the others wait for it for ever. Something that must run has to depend
        on these.
        """
        outputs, self._outputs = self._outputs, []
        return outputs

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], dtype: tf.DType | None = None
    ) -> list[tf.Tensor]:
        """Adds up tensors over all workers.

        Args:
            tensors: Tensors of static shape, the same on every worker.
            dtype: Dtype on the wire; None is each tensor's own.

        Returns:
            The sums, in the tensors' own dtype, the same bits everywhere.
        """
        if self.workers == 1 or not tensors:
            return list(tensors)
        everyone = tuple(range(self.workers))
        results: list[tf.Tensor] = []
        for bucket in split_buckets(tensors, dtype):
            flat = flatten(bucket, dtype)
            group, instance = self._keys("reduce", everyone, 0, flat)
            flat = tf.raw_ops.CollectiveReduce(
                input=flat,
                group_size=self.workers,
                group_key=group,
                instance_key=instance,
                merge_op="Add",
                final_op="Id",
                subdiv_offsets=[0],
                communication_hint=self._hint,
            )
            self._outputs.append(flat)
            results += unflatten(flat, bucket)
        return results

    def broadcast(
        self,
        tensors: Sequence[tf.Tensor] | None,
        like: Sequence[tf.TensorSpec],
        root: int,
        members: tuple[int, ...],
        dtype: tf.DType | None = None,
    ) -> list[tf.Tensor] | None:
        """Sends tensors from one worker to the other members of a group.

        Args:
            tensors: The tensors; looked at on the root only.
            like: Their shapes and dtypes.
            root: The worker that sends.
            members: The group, the root among them, in ascending order.
            dtype: Dtype on the wire; None is each tensor's own.

        Returns:
            The tensors on the members, as they came off the wire (on the root
            too, so that all have the same bits); None on other workers.
        """
        results: list[tf.Tensor] = []
        start = 0
        for bucket in split_buckets(like, dtype):
            mine = None
            if self.rank == root and tensors is not None:
                part = tensors[start : start + len(bucket)]
                mine = flatten(part, dtype)
            start += len(bucket)
            flat = self._broadcast_flat(mine, bucket, root, members, dtype)
            if flat is not None:
                results += unflatten(flat, bucket)
        return results if self.rank in members else None

    def _broadcast_flat(
        self,
        flat: tf.Tensor | None,
        bucket: Sequence[tf.TensorSpec],
        root: int,
        members: tuple[int, ...],
        dtype: tf.DType | None,
    ) -> tf.Tensor | None:
        wire = dtype or bucket[0].dtype
        size = sum(math.prod(spec.shape) for spec in bucket)
        spec = tf.TensorSpec([size], wire)
        group, instance = self._keys("broadcast", members, root, spec)
        if self.rank not in members:
            return None
        # The broadcast operations do not know bfloat16; its bits travel as
        # float16's.
        carrier = tf.float16 if wire == tf.bfloat16 else wire
        arguments = {
            "group_size": len(members),
            "group_key": group,
            "instance_key": instance,
            "shape": [size],
            "communication_hint": self._hint,
        }
        if self.rank == root:
            sent = tf.bitcast(flat, carrier) if carrier != wire else flat
            # The handle keeps the send in the graph.
            done = tf.raw_ops.CollectiveBcastSend(input=sent, **arguments)
            self._outputs.append(done)
            with tf.control_dependencies([done]):
                return tf.identity(flat)
        received = tf.raw_ops.CollectiveBcastRecv(T=carrier, **arguments)
        self._outputs.append(received)
        return tf.bitcast(received, wire) if carrier != wire else received

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stacks a tensor of static shape from all workers, by rank."""
        if self.workers == 1:
            return tensor[None]
        flat = tf.reshape(tensor, [1, -1])
        everyone = tuple(range(self.workers))
        group, instance = self._keys("gather", everyone, 0, flat)
        gathered = tf.raw_ops.CollectiveGather(
            input=flat,
            group_size=self.workers,
            group_key=group,
            instance_key=instance,
            shape=[self.workers, flat.shape[1]],
            communication_hint=self._hint,
        )
        self._outputs.append(gathered)
        return tf.reshape(gathered, [self.workers, *tensor.shape])

    def reduce_scatter(self, parts: tf.Tensor) -> tf.Tensor:
        """Adds up tensors over all workers and leaves each its part.

        Args:
            parts: `(workers, ...)`, of static shape, a part for each worker.
        """
        if self._one_process:
            (total,) = self.all_reduce([parts])
            return total[self.rank]
        return tf.reduce_sum(self.all_to_all(parts), 0)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Exchanges parts: part `i` of worker `j` becomes part `j` of `i`.

        Args:
            tensor: `(workers, ...)`, of static shape, a part for each worker.
        """
        if self.workers == 1:
            return tensor
        if self._one_process:
            return self.all_gather(tensor)[:, self.rank]
        flat = tf.reshape(tensor, [self.workers, -1])
        everyone = tuple(range(self.workers))
        group, instance = self._keys("all to all", everyone, 0, flat)
        exchanged = tf.raw_ops.CollectiveAllToAllV2(
            input=flat,
            group_size=self.workers,
            group_key=group,
            instance_key=instance,
            ordering_token=[],
            communication_hint=self._hint,
        )
        self._outputs.append(exchanged)
        return tf.reshape(exchanged, tensor.shape)

    def _keys(
        self,
        kind: str,
        members: tuple[int, ...],
        root: int,
        tensor: tf.Tensor | tf.TensorSpec,
    ) -> tuple[int, int]:
        """Group and instance key of the next call.

        They depend on what is sent, not on how many traces there were, so
        workers whose traces differ in number still agree.
        """
        self._calls += 1
        group = stable_key(self._scope, members)
        shape = tuple(tensor.shape)
        what = (kind, members, root, shape, tensor.dtype.name, self._calls)
        return group, stable_key(self._scope, what)


def stable_key(*parts: object) -> int:
    """A key in a range that TensorFlow's own counters never reach."""
    text = repr(parts).encode()
    return 2**30 + zlib.crc32(text) % 2**30


def split_buckets(
    tensors: Sequence[tf.Tensor] | Sequence[tf.TensorSpec],
    dtype: tf.DType | None,
) -> list[list[tf.Tensor]]:
    """Groups tensors, in order, into buckets of one wire dtype and size."""
    buckets: list[list[tf.Tensor]] = []
    filled, last = 0, None
    for tensor in tensors:
        wire = dtype or tensor.dtype
        size = math.prod(tensor.shape) * wire.size
        if last != wire or filled + size > BUCKET_BYTES:
            buckets.append([])
            filled, last = 0, wire
        buckets[-1].append(tensor)
        filled += size
    return buckets


def flatten(tensors: Sequence[tf.Tensor], dtype: tf.DType | None) -> tf.Tensor:
    """Joins tensors into one vector in the wire dtype."""
    parts = [tf.reshape(t, [-1]) for t in tensors]
    flat = tf.concat(parts, 0)
    return flat if dtype is None else tf.cast(flat, dtype)


def unflatten(
    flat: tf.Tensor, like: Sequence[tf.Tensor | tf.TensorSpec]
) -> list[tf.Tensor]:
    """Takes a vector apart again."""
    sizes = [math.prod(t.shape) for t in like]
    parts = tf.split(flat, sizes)
    return [
        tf.cast(tf.reshape(part, t.shape), t.dtype)
        for part, t in zip(parts, like, strict=True)
    ]
