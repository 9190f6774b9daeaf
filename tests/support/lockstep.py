"""Workers as threads of one process, eager and in step: no cluster needed."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf

T = TypeVar("T")
PATIENCE = 30.0  # seconds that a thread waits for the others


class Meeting:
    """Where threads exchange values."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers, timeout=PATIENCE)
        self._values: list[Any] = [None] * workers

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all threads, by rank."""
        self._values[rank] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values


class Lockstep:
    """Has the methods of `Communicator`, and counts what is received."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self.received = 0.0  # elements
        self.received_bytes = 0.0
        self._meeting = meeting

    def _count(self, elements: float, dtype: tf.DType) -> None:
        self.received += elements
        self.received_bytes += elements * dtype.size

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], dtype: tf.DType | None = None
    ) -> list[tf.Tensor]:
        wired = [tf.cast(t, dtype or t.dtype) for t in tensors]
        everyone = self._meeting.swap(self.rank, wired)
        for tensor in wired:
            share = 2 * (self.size - 1) / self.size
            self._count(share * math.prod(tensor.shape), tensor.dtype)
        sums = [tf.add_n(list(parts)) for parts in zip(*everyone, strict=True)]
        return [
            tf.cast(total, t.dtype)
            for total, t in zip(sums, tensors, strict=True)
        ]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        stacked = tf.stack(self._meeting.swap(self.rank, tensor))
        self._count((self.size - 1) * math.prod(tensor.shape), tensor.dtype)
        return stacked

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        everyone = self._meeting.swap(self.rank, tensor)
        part = math.prod(tensor.shape[1:])
        self._count((self.size - 1) * part, tensor.dtype)
        return tf.stack([parts[self.rank] for parts in everyone])

    def reduce_scatter(self, parts: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.all_to_all(parts), 0)

    def broadcast(
        self,
        tensors: Sequence[tf.Tensor] | None,
        like: Sequence[tf.TensorSpec],
        root: int,
        members: tuple[int, ...],
    ) -> list[tf.Tensor] | None:
        sent = self._meeting.swap(self.rank, tensors)[root]
        assert sent is not None
        assert list(members) == sorted({*members, root})
        for tensor, spec in zip(sent, like, strict=True):
            assert tensor.shape == spec.shape
            assert tensor.dtype == spec.dtype
        if self.rank not in members:
            return None
        if self.rank != root:
            for tensor in sent:
                self._count(math.prod(tensor.shape), tensor.dtype)
        return list(sent)


def run_together(
    workers: int, function: Callable[[Any], T]
) -> list[tuple[T, float]]:
    """Calls a function of a `Lockstep` once for each worker.

    Returns:
        By rank, what it returned and the number of elements received.
    """
    meeting = Meeting(workers)

    def work(rank: int) -> tuple[T, float]:
        group = Lockstep(rank, workers, meeting)
        try:
            return function(group), group.received
        except BaseException:
            meeting.barrier.abort()  # the other threads fail, too
            raise

    with ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(work, rank) for rank in range(workers)]
    errors = [error for f in futures if (error := f.exception())]
    # The first cause comes last.
    errors.sort(key=lambda e: not isinstance(e, threading.BrokenBarrierError))
    if errors:
        raise errors[-1]
    return [future.result() for future in futures]
