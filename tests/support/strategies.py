"""The strategies of jobs, and what their replicas hold."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfkfac
from tests.support.reference import Array
from tfkfac.compat.strategies import is_repaired, repair

DEVICES = ["CPU:0", "CPU:1"]


@functools.cache
def strategy(kind: str | None) -> Any:
    """The strategy of this process, which can have one of each kind only.

    Args:
        kind: "multi" is ours and "stock" is TensorFlow's, repaired, for
            several workers; "mirrored" is TensorFlow's for several devices,
            "repaired" the same with our repairs; None is no strategy.
    """
    if kind is None:
        return tf.distribute.get_strategy()
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(DEVICES)
    if kind == "repaired":
        return repair(tf.distribute.MirroredStrategy(DEVICES))
    if kind == "stock":
        stock = tf.distribute.MultiWorkerMirroredStrategy()
        assert not is_repaired(stock)
        return repair(stock)
    assert kind == "multi"
    return tfkfac.MultiWorkerMirroredStrategy()


def local_ranks(kind: str | None) -> list[int]:
    if kind == "multi":
        return [strategy(kind).cluster_resolver.task_id]
    return list(range(strategy(kind).num_replicas_in_sync))


def copies(kind: str | None, variables: Sequence[Any]) -> list[list[Array]]:
    """The values that each local replica has of some variables."""
    local = strategy(kind).experimental_local_results
    values = [local(v.value) for v in variables]
    return [
        [v[i].numpy() for v in values] for i in range(len(local_ranks(kind)))
    ]
