"""Stores of what taps note in one trace of one replica, and pauses.

Notes are Python objects that hold the tensors of one trace. They live on the
graph that they belong to, so that no trace ever sees another's tensors.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfkfac.compat.graphs import open_graphs, under_tape

_STORE = "_tfkfac_records"
_state = threading.local()


class TraceStore(dict[tuple[int, int], Any]):
    """Notes of taps in one graph, by (tap, replica)."""


def capturing() -> bool:
    """True if a tape is on and nobody has paused the taps."""
    return not is_paused() and under_tape()


def is_paused() -> bool:
    """True if somebody keeps the taps of this thread from noting."""
    return getattr(_state, "paused", False)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Keeps all taps of this thread from noting anything."""
    before = is_paused()
    _state.paused = True
    try:
        yield
    finally:
        _state.paused = before


def replica_id() -> int:
    """Returns the static index of the replica being traced, 0 if alone."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    index = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if index is None else int(index)


def current_store(eager: TraceStore) -> TraceStore:
    """Returns the store of the current graph, `eager` outside of graphs."""
    if tf.executing_eagerly():
        return eager
    graph = tf.compat.v1.get_default_graph()
    store = getattr(graph, _STORE, None)
    if store is None:
        store = TraceStore()
        setattr(graph, _STORE, store)
    return store


def visible_stores(eager: TraceStore) -> list[TraceStore]:
    """Returns the stores whose tensors can be used here.

    Those are the current graph's and, from within a branch of a `tf.cond`,
    the enclosing graphs'.
    """
    if tf.executing_eagerly():
        return [eager]
    stores = [getattr(graph, _STORE, None) for graph in open_graphs()]
    return [store for store in stores if store is not None]
