"""The strategy of this process, and values of variables on its replicas."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfkfac
from tests.support.reference import Array
from tfkfac.compat.strategies import is_repaired, repair

# If set, use TensorFlow's strategies and repair them.
STOCK = "TFKFAC_TEST_STOCK_STRATEGY"


@functools.cache
def strategy() -> Any:
    """Return the strategy for the processes and devices of this cluster.

    With a single process of one device, the default strategy.
    """
    if "TF_CONFIG" in os.environ:
        if STOCK not in os.environ:
            return tfkfac.MultiWorkerMirroredStrategy()
        stock = tf.distribute.MultiWorkerMirroredStrategy()
        assert not is_repaired(stock)
        return repair(stock)
    count = len(tf.config.list_logical_devices("CPU"))
    if count == 1:
        return tf.distribute.get_strategy()
    mirrored = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(count)]
    )
    return repair(mirrored) if STOCK in os.environ else mirrored


def create_strategy() -> None:
    strategy()


def local_ranks() -> list[int]:
    """Return the ranks of the replicas of this process."""
    if "TF_CONFIG" in os.environ:
        return [strategy().cluster_resolver.task_id]
    return list(range(strategy().num_replicas_in_sync))


def copies(variables: Sequence[Any]) -> list[list[Array]]:
    """Return the values of variables on each local replica."""
    local = strategy().experimental_local_results
    values = [local(v.value) for v in variables]
    return [[v[i].numpy() for v in values] for i in range(len(local_ranks()))]
