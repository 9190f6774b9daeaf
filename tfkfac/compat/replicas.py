"""Replicas of one process, whose operations are all in one graph."""

import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import handle_data_util

from tfkfac.compat.graphs import open_graphs

T = TypeVar("T")

_CHAINS = "_tfkfac_chains"
_SCOPE = re.compile(r"(?:^|/)replica_(\d+)/")


def keep_apart(devices: Sequence[str | None]) -> None:
    """Lets no replica wait for what another one asserts, prints or looks up.

    TensorFlow runs what may have a side effect in the order of the program:
    all assertions and prints, all that a table is used for. It has the replicas
    of a process in one graph, the first one's operations before those of the
    second. So what the second asserts in its loss would wait for a print in the
    first one's step, that print for a sum over the replicas, and the sum for
    what the second asserts. Here the operations of each replica but the first
    are in order among themselves. Only variables keep the order of all.

    This relies on `register_acd_resource_resolver`: a function that changes
    the set of tensors whose users are put in order. And on a `MirroredStrategy`
    giving what these replicas do, gradients too, the scope `replica_1`, and
    their device to what the user places on none. What prints out of its scope
    is known by the device.

    Args:
        devices: The devices of the replicas of this process, in their order.
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
    same time, each in a thread of its own.

    This relies on `merge_call` passing on the functions of all replicas, and on
    a `tf.distribute.ReplicaContext` making a thread that of a replica.

    Args:
        do: What is done. It must not call `merge_call` itself.
        device: The device of this replica.

    Returns:
        What it returns.
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
    common = [t for t in writes if own is not None and not _is_variable(t)]
    on_nothing = not reads and not writes
    if not common and not (
        on_nothing and auto_control_deps.op_is_stateful(operation)
    ):
        return False
    for tensor in common:
        writes.discard(tensor)
    writes.add(chain)
    return True


def _is_variable(resource: tf.Tensor) -> bool:
    """Whether a handle is a variable's: only of these it has the shape."""
    return bool(handle_data_util.get_resource_handle_data(resource).is_set)
