"""Repair strategies for Keras' `fit`; helpers for replicas."""

import contextlib
import ctypes
import functools
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.impl import api
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import handle_data_util

from tfkfac.compat.data import copy_generated
from tfkfac.compat.graphs import Sum, open_graphs
from tfkfac.compat.overrides import Below, Override, overridden, override

_StrategyT = TypeVar("_StrategyT", bound=tf.distribute.Strategy)
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

_ALL_REDUCE = "all_reduce"
_MIRRORED = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.MirroredStrategy,
)


def call_unconverted(function: _FunctionT) -> _FunctionT:
    """Decorator: AutoGraph calls the function as a function of TensorFlow.

    `do_not_convert` would also exclude the functions of the user that the
    function calls. This relies on `autograph_artifact`.
    """
    return api.autograph_artifact(function)


def repair(strategy: _StrategyT) -> _StrategyT:
    """Repair a mirrored strategy for `fit` of Keras 3, and return it.

    No-op for other strategies, and for a repaired strategy.

    - `fit` and `evaluate` of models that are compiled later take the shapes of
      a batch from the data, see `build_from_specs`.
    - `experimental_distribute_dataset` copies the arrays of Python generators,
      see `copy_generated`.
    - `reduce` of a `tf.distribute.MultiWorkerMirroredStrategy` ignores the
      `axis` of scalars, such as the metrics of Keras.
    """
    if isinstance(strategy, _MIRRORED) and not is_repaired(strategy):
        strategy.reduce = functools.partial(_reduce, strategy, strategy.reduce)
        distribute = strategy.experimental_distribute_dataset
        strategy.experimental_distribute_dataset = (
            lambda dataset, options=None: distribute(
                copy_generated(dataset), options
            )
        )
        handler = signal.getsignal(signal.SIGTERM)
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and handler is not None:
            # Install the handler again: TensorFlow has replaced it in C.
            signal.signal(signal.SIGTERM, handler)
    return strategy


def is_repaired(strategy: tf.distribute.Strategy) -> bool:
    """True if `strategy.reduce` is the `reduce` of this module."""
    method = strategy.reduce
    return isinstance(method, functools.partial) and method.func is _reduce


def build_from_specs(model: Any) -> list[Override]:
    """Build a model of a repaired strategy from the specs of its data.

    Under a strategy, Keras reads a batch to build the model, in each `fit` and
    `evaluate`. A generator or `PyDataset(workers=2)` cannot be read again, so
    the rows of this batch, and of prefetched batches, would be lost.

    This relies on `fit` and `evaluate` calling `_maybe_symbolic_build` with a
    `TFEpochIterator`, on its `_distributed_dataset`, and on the `_value_specs`
    of a `PerReplicaSpec`.
    """
    if not is_repaired(model.distribute_strategy):
        return []

    def build(
        below: Below, iterator: Any = None, data_batch: Any = None
    ) -> Any:
        if iterator is not None:
            data_batch = tf.nest.map_structure(
                lambda spec: getattr(spec, "_value_specs", [spec])[0],
                iterator._distributed_dataset.element_spec,
            )
        below(data_batch=data_batch)

    return [override(model, "_maybe_symbolic_build", build)]


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Return the devices of a strategy's replicas in this process, in order.

    The default strategy has none. This relies on `worker_devices` containing
    only the devices of this process, also with several processes.
    """
    return tuple(strategy.extended.worker_devices)


def uses_ring(strategy: tf.distribute.Strategy) -> bool:
    """True if collectives on GPUs use TensorFlow's ring instead of NCCL.

    The user can choose it, and a `MirroredStrategy` uses it on logical GPUs.
    This relies on `_communication_options` of `strategy.extended`.
    """
    options = strategy.extended._communication_options
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    return bool(options.implementation == ring)


@call_unconverted
def _reduce(
    strategy: tf.distribute.Strategy,
    original: Callable[..., Any],
    reduce_op: tf.distribute.ReduceOp | str,
    value: Any,
    axis: int | None = None,
) -> Any:
    """Reduce a per-replica value by `original`; ignore the axis of a scalar."""
    local, *_ = strategy.experimental_local_results(value)
    is_scalar = tf.TensorShape(getattr(local, "shape", ())).rank == 0
    return original(reduce_op, value, axis=None if is_scalar else axis)


@contextlib.contextmanager
def summing_replicas(total: Sum) -> Iterator[None]:
    """Replace `ReplicaContext.all_reduce` by `total` in this thread.

    The original is illegal inside a `tf.cond`. This relies on the gradient of
    `all_reduce` calling the method `all_reduce`.
    """
    classes = tf.distribute.ReplicaContext.__mro__
    owner = next(c for c in classes if _ALL_REDUCE in vars(c))

    def all_reduce(
        _: Any,
        /,
        replica: Any,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Any,
        options: Any = None,
    ) -> Any:
        name = reduce_op if isinstance(reduce_op, str) else reduce_op.value
        is_mean = str(name).upper() == tf.distribute.ReduceOp.MEAN.value
        count = replica.num_replicas_in_sync if is_mean else 1
        return tf.nest.map_structure(lambda x: total(x) / count, value)

    with overridden(owner, _ALL_REDUCE, all_reduce):
        yield


@contextlib.contextmanager
def keep_handler(number: int) -> Iterator[None]:
    """Context manager: restore the handler of a signal on exit.

    The constructor of `tf.distribute.MultiWorkerMirroredStrategy` installs a C
    handler of SIGTERM (preemption notice), so that the process ignores the
    signal. `signal.signal` could restore the handler only in the main thread;
    `PyOS_setsig` works in every thread, and also restores C handlers.
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


_CHAINS = "_tfkfac_chains"
_SCOPE = re.compile(r"(?:^|/)replica_(\d+)/")


def order_by_replica(devices: Sequence[str | None]) -> None:
    """Order stateful operations per replica instead of per graph.

    TensorFlow runs stateful operations (assertions, prints, table lookups) in
    program order, and has all replicas of a process in one graph. This can
    deadlock: an assertion in the loss of replica 1 waits for a print of replica
    0, which waits for a sum over the replicas, which waits for replica 1. Here
    each replica but the first has a separate order. Only operations on
    variables keep the common order. `devices` are the devices of the local
    replicas.

    This relies on `register_acd_resource_resolver`, a hook that can change the
    tensors whose users TensorFlow orders. It also relies on `MirroredStrategy`
    using the name scope `replica_1` (also for gradients) and the replica's
    device for operations of replica 1.
    """
    for graph in open_graphs():
        if graph.building_function and not hasattr(graph, _CHAINS):
            by_scope: dict[str, tf.Tensor] = {}
            by_device: dict[str | None, tf.Tensor] = {}
            for replica, device in enumerate(devices[1:], 1):
                with graph.as_default(), tf.control_dependencies(None):
                    # TensorFlow orders the users of this dummy tensor.
                    chain = tf.constant(0)
                by_scope[str(replica)] = by_device[device] = chain
            setattr(graph, _CHAINS, (by_scope, by_device))
    _register(_order_operation)


_register = functools.cache(auto_control_deps.register_acd_resource_resolver)


def _order_operation(operation: tf.Operation, reads: Any, writes: Any) -> bool:
    """Order a stateful operation after earlier operations of its replica only.

    Return True if `writes`, the tensors whose users TensorFlow orders, has
    changed. TensorFlow calls this resolver until the result is False.
    """
    chains = getattr(operation.graph, _CHAINS, None)
    if chains is None:
        return False
    by_scope, by_device = chains
    scope = _SCOPE.search(operation.name)
    scope_chain = by_scope.get(scope[1]) if scope is not None else None
    in_scope = scope_chain is not None
    chain = scope_chain if in_scope else by_device.get(operation.device)
    if chain is None or chain in writes:
        return False
    # Handles with shape data are variables; all others are tables.
    data = handle_data_util.get_resource_handle_data
    tables = [t for t in writes if in_scope and not data(t).is_set]
    has_no_resource = not reads and not writes
    if not tables and not (
        has_no_resource and auto_control_deps.op_is_stateful(operation)
    ):
        return False
    for tensor in tables:
        writes.discard(tensor)
    writes.add(chain)
    return True
