"""Strategies as `fit` needs them, and replicas that share one graph."""

import contextlib
import ctypes
import functools
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import handle_data_util
from typing_extensions import override

from tfkfac.compat.graphs import Sum, open_graphs
from tfkfac.compat.overrides import overridden

_StrategyT = TypeVar("_StrategyT", bound=tf.distribute.Strategy)

_ADDS = "all_reduce"
_REPAIRABLE = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.MirroredStrategy,
)
# What TensorFlow's collectives can add up.
_REDUCIBLE = frozenset(
    [tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64]
)


class ReducingStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """TensorFlow's strategy with the `reduce` that Keras 3 needs."""

    @override
    def reduce(
        self,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Any,
        axis: int | None = None,
    ) -> Any:
        """Combines a value of every replica into one, leaf by leaf.

        As in `tf.distribute.Strategy.reduce`, and also:

        - `value` may be a nested structure of per-replica values.
        - The `axis` of a scalar is ignored.
        - Outside of a `tf.function`, the mean without an `axis` of what has
          none (strings, booleans, small integers, sparse tensors, and shapes
          that differ between replicas) is the value of the first local
          replica: Keras asks for it to learn the shapes and dtypes of a batch,
          whose last rows rarely are as many on every worker.

        Args:
            reduce_op: A `tf.distribute.ReduceOp` or its name.
            value: A per-replica value or a structure of them.
            axis: The axis to reduce within each replica as well, or None.

        Returns:
            A tensor, or a structure of tensors like `value`.
        """
        return _reduce(self, super().reduce, reduce_op, value, axis)


def repair(strategy: _StrategyT) -> _StrategyT:
    """Gives an existing strategy the `reduce` that Keras needs.

    It changes this object only, and nothing if it has been repaired before.
    `tf.distribute.MirroredStrategy` gains less: `fit` works with the original
    but for first batches that cannot be averaged over replicas (strings,
    booleans, or fewer rows on some replicas).

    Raises:
        TypeError: If it is neither a `tf.distribute.MirroredStrategy` nor a
            `tf.distribute.MultiWorkerMirroredStrategy`.
    """
    if not isinstance(strategy, _REPAIRABLE):
        raise TypeError(
            "Argument `strategy` must be a "
            "`tf.distribute.MultiWorkerMirroredStrategy` or a "
            "`tf.distribute.MirroredStrategy`. "
            f"Received: strategy={strategy} (of type {type(strategy)})"
        )
    if not is_repaired(strategy):
        strategy.reduce = functools.partial(_reduce, strategy, strategy.reduce)
        handler = signal.getsignal(signal.SIGTERM)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and handler is not None:
            # TensorFlow has replaced it in C; see `keep_handler`.
            signal.signal(signal.SIGTERM, handler)
    return strategy


def is_repaired(strategy: tf.distribute.Strategy) -> bool:
    """True if `strategy.reduce` is the one of this module."""
    method = strategy.reduce
    return isinstance(strategy, ReducingStrategy) or (
        isinstance(method, functools.partial) and method.func is _reduce
    )


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The devices of a strategy's replicas in this process, in their order.

    It relies on `strategy.extended.worker_devices`, in which, under a
    `MultiWorkerMirroredStrategy` too, there are those of this process only.
    The default strategy has none.
    """
    return tuple(strategy.extended.worker_devices)


def _reduce(
    strategy: tf.distribute.Strategy,
    original: Callable[..., Any],
    reduce_op: tf.distribute.ReduceOp | str,
    value: Any,
    axis: int | None = None,
) -> Any:
    def reduce_leaf(leaf: Any) -> Any:
        local = strategy.experimental_local_results(leaf)
        if tf.TensorShape(getattr(local[0], "shape", ())).rank == 0:
            return original(reduce_op, leaf, axis=None)
        needs_mean = axis is None and _is_mean(reduce_op)
        # In a graph the answer cannot depend on the shapes of other workers.
        if needs_mean and tf.executing_eagerly():
            sparse = isinstance(local[0], (tf.SparseTensor, tf.RaggedTensor))
            if sparse or local[0].dtype not in _REDUCIBLE:
                return local[0]
            if not _have_one_shape(strategy, original, local):
                return local[0]
        return original(reduce_op, leaf, axis=axis)

    return tf.nest.map_structure(reduce_leaf, value)


def _is_mean(reduce_op: tf.distribute.ReduceOp | str) -> bool:
    name = reduce_op if isinstance(reduce_op, str) else reduce_op.value
    return str(name).upper() == tf.distribute.ReduceOp.MEAN.value


def _have_one_shape(
    strategy: tf.distribute.Strategy,
    original: Callable[..., Any],
    local: Sequence[Any],
) -> bool:
    """True if all replicas, also those of other workers, agree on a shape.

    Two sums tell; a gathering of the shapes takes several times as long.
    """

    def total(values: Sequence[tf.Tensor]) -> tf.Tensor:
        remaining = iter(values)
        by_replica = strategy.experimental_distribute_values_from_function(
            lambda context: next(remaining)
        )
        return original("SUM", by_replica, axis=None)

    shapes = [tf.shape(value, out_type=tf.int64) for value in local]
    common = total(shapes) / strategy.num_replicas_in_sync
    differ = [
        tf.reduce_any(tf.cast(shape, common.dtype) != common)
        for shape in shapes
    ]
    return int(total([tf.cast(d, tf.int32) for d in differ])) == 0


@contextlib.contextmanager
def summing_replicas(total: Sum) -> Iterator[None]:
    """Replaces the `all_reduce` of replica contexts in this thread.

    What they do themselves is illegal inside a `tf.cond`; `total` is the sum
    of a tensor over the replicas. This relies on the gradient of an
    `all_reduce` being one by that method.
    """
    owner = next(
        c for c in tf.distribute.ReplicaContext.__mro__ if _ADDS in vars(c)
    )

    def all_reduce(
        _: Any,
        /,
        replica: Any,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Any,
        options: Any = None,
    ) -> Any:
        count = replica.num_replicas_in_sync if _is_mean(reduce_op) else 1
        return tf.nest.map_structure(lambda x: total(x) / count, value)

    with overridden(owner, _ADDS, all_reduce):
        yield


def abort_collectives(message: str) -> None:
    """Ends all collectives of this process, present and to come, with an error.

    It may be called in any thread. Each of them ends with a
    `tf.errors.UnavailableError` that says the message. This relies on
    `abort_collective_ops` of TensorFlow's context, which
    `CommunicationOptions(timeout_seconds=...)` is made with, too.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


@contextlib.contextmanager
def keep_handler(number: int) -> Iterator[None]:
    """Restores the handler of a signal at the end of a `with` block.

    The constructor of a `tf.distribute.MultiWorkerMirroredStrategy` makes
    TensorFlow catch SIGTERM in C, for its notice of preemption, and nothing
    else acts on it: the process ignores the signal. Python does not know of
    it: `signal.getsignal` returns the handler from before. `signal.signal`
    would restore it, in the main thread only; `PyOS_setsig` works in every
    thread and also restores a handler that was set in C.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.argtypes, get.restype = [ctypes.c_int], ctypes.c_void_p
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    put.restype = ctypes.c_void_p
    before = get(number)
    try:
        yield
    finally:
        put(number, before)


def leave_note(key: str, text: str) -> None:
    """Leaves a note for all processes of a job; the first of a key stays.

    This relies on the key-value store of TensorFlow's coordination service,
    which every `MultiWorkerMirroredStrategy` starts. Where that is gone with
    the first worker, nothing is left.
    """
    with contextlib.suppress(tf.errors.OpError):
        context.context().set_config_key_value(key, text)


def read_note(key: str, seconds: float) -> str | None:
    """A note of any process; None if there is none after some seconds.

    It relies on what `leave_note` does. Other threads go on.
    """
    wait = max(int(1000 * seconds), 1)  # 0 would be for ever
    with contextlib.suppress(tf.errors.OpError):
        return str(context.context().get_config_key_value(key, wait))
    return None


T = TypeVar("T")

_CHAINS = "_tfkfac_chains"
_SCOPE = re.compile(r"(?:^|/)replica_(\d+)/")


def keep_apart(devices: Sequence[str | None]) -> None:
    """Lets no replica wait for what another one asserts, prints or looks up.

    TensorFlow runs what may have a side effect in the order of the program:
    all assertions and prints, all that a table is used for. It has the replicas
    of a process, whose devices are given in their order, in one graph, the
    first one's operations before those of the second. So what the second
    asserts in its loss would wait for a print in the first one's step, that
    print for a sum over the replicas, and the sum for what the second asserts.
    Here the operations of each replica but the first are in order among
    themselves. Only variables keep the order of all.

    This relies on `register_acd_resource_resolver`: a function that changes
    the set of tensors whose users are put in order. And on a `MirroredStrategy`
    giving what these replicas do, gradients too, the scope `replica_1`, and
    their device to what the user places on none. What prints out of its scope
    is known by the device.
    """
    for graph in open_graphs():
        if graph.building_function and not hasattr(graph, _CHAINS):
            by_scope: dict[str, tf.Tensor] = {}
            by_device: dict[str | None, tf.Tensor] = {}
            for place, device in enumerate(devices[1:], 1):
                with graph.as_default(), tf.control_dependencies(None):
                    # Its users are in order; nobody needs its value.
                    chain = tf.constant(0)
                by_scope[str(place)] = by_device[device] = chain
            setattr(graph, _CHAINS, (by_scope, by_device))
    _register()


def side_by_side(do: Callable[[], T], device: str | None) -> T:
    """Does something with collectives on a replica that runs eagerly.

    A `MirroredStrategy` runs its replicas in turn, each until it calls
    `merge_call`: the first one's collective would wait for a replica whose turn
    never comes. Here all of them come to one such call, and then do it at the
    same time, each in a thread of its own and on its device. What is done must
    not call `merge_call` itself.

    This relies on `merge_call` passing on the functions of all replicas, and on
    a `tf.distribute.ReplicaContext` making a thread that of a replica.
    """
    replica = tf.distribute.get_replica_context()
    number = replica.replica_id_in_sync_group
    results: list[T] = []

    def in_thread() -> None:
        own = tf.distribute.ReplicaContext(replica.strategy, number)
        with own, tf.device(device):
            results.append(do())

    replica.merge_call(_run_all, args=(in_thread,))
    return results[0]


def _run_all(strategy: tf.distribute.Strategy, functions: Any) -> None:
    """Runs functions of all replicas at the same time."""
    local = strategy.experimental_local_results(functions)
    with ThreadPoolExecutor(len(local)) as threads:
        for ended in [threads.submit(function) for function in local]:
            ended.result()


@functools.cache
def _register() -> None:
    auto_control_deps.register_acd_resource_resolver(_order)


def _order(operation: tf.Operation, reads: Any, writes: Any) -> bool:
    """Puts an operation that would be in the order of all in its replica's.

    TensorFlow asks again until there is nothing to change.
    """
    chains = getattr(operation.graph, _CHAINS, None)
    if chains is None:
        return False
    by_scope, by_device = chains
    scope = _SCOPE.search(operation.name)
    own = by_scope.get(scope[1]) if scope is not None else None
    chain = by_device.get(operation.device) if own is None else own
    if chain is None or chain in writes:
        return False
    # Only of variables a handle has the shape.
    known = handle_data_util.get_resource_handle_data
    common = [t for t in writes if own is not None and not known(t).is_set]
    on_nothing = not reads and not writes
    if not common and not (
        on_nothing and auto_control_deps.op_is_stateful(operation)
    ):
        return False
    for tensor in common:
        writes.discard(tensor)
    writes.add(chain)
    return True
