"""`MultiWorkerMirroredStrategy` for Keras 3."""

import copy
import functools
import os
import sys
import warnings
from typing import TypeAlias

import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.cluster.channel import Channel
from tfkfac.cluster.config import (
    EVALUATOR,
    Cluster,
    from_resolver,
    read_tf_config,
)
from tfkfac.cluster.rendezvous import wait_for_all
from tfkfac.cluster.stopping import Stopping
from tfkfac.cluster.watch import Standstill, Watch
from tfkfac.compat.strategies import ReducingStrategy

Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver
Options: TypeAlias = tf.distribute.experimental.CommunicationOptions


class MultiWorkerMirroredStrategy(ReducingStrategy):
    """Synchronous training on several workers, with Keras 3.

    This is `tf.distribute.MultiWorkerMirroredStrategy` with a `reduce` that
    takes what Keras passes to it; with the original, `fit` and `evaluate` fail
    on several workers, whatever the optimizer (keras-team/keras#20585).

    Every worker runs the same program. It creates the strategy before anything
    else of TensorFlow, and only one. The environment variable `TF_CONFIG`
    tells each worker who it is; without it there is one worker, which it says.
    The workers wait for each other here, and say for whom. From then on each
    learns within seconds if another one fails or is gone, also while it waits
    for it: `fit` and `evaluate` raise a `RuntimeError` that names it and the
    cause, and in `predict` and a loop of your own the error of the collective
    does. A worker that is slow is left alone; when no step of `fit` ends for a
    minute, the first worker says in which functions each of them is.

    A task of type "evaluator" takes no part in this: it is alone, and says so.

    Args:
        cluster_resolver: Where to find the workers, `TF_CONFIG` by default.
        communication_options: Options of TensorFlow's collectives. Leave
            `timeout_seconds` unset: TensorFlow 2.21 leaks threads with it.
        start_timeout: Seconds that a worker waits for the others to start;
            None is for ever. Defaults to 600.

    Raises:
        TimeoutError: If a worker has not started in time. The message names
            it.
        ValueError: If `TF_CONFIG` or the resolver is malformed, has parameter
            servers, names other workers than that of another worker, or two
            processes have one index.

    Example:
    ```python
    # On the second of two workers, before the program starts:
    # TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]},
    #             "task": {"type": "worker", "index": 1}}'
    strategy = tfkfac.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.applications.ResNet50(weights=None)
        model.compile(
            optimizer=tfkfac.KFAC(distribution="dp_kfac"),
            loss="sparse_categorical_crossentropy",
        )
    # The batch size is that of all workers together.
    model.fit(dataset, epochs=55)
    ```
    """

    watch: Watch | None = None  # of several workers
    stopping: Stopping | None = None
    standstill: Standstill | None = None

    def __init__(
        self,
        cluster_resolver: Resolver | None = None,
        communication_options: Options | None = None,
        *,
        start_timeout: float | None = 600.0,
    ) -> None:
        _check_timeout(start_timeout)
        _warn_of_threads(communication_options)
        cluster = _find_cluster(cluster_resolver)
        cluster_resolver = _apart_if_evaluator(cluster_resolver)
        lines = {} if cluster is None else wait_for_all(cluster, start_timeout)
        super().__init__(cluster_resolver, communication_options)
        if cluster is not None and lines:
            size = len(cluster.addresses)
            names = [cluster.name(index) for index in range(size)]
            channel = Channel(cluster.index, size, lines)
            self.watch = Watch(cluster, channel)
            self.stopping = Stopping(channel)
            self.standstill = Standstill(names, channel)
            channel.start(self.watch, self.stopping, self.standstill)


def _find_cluster(resolver: Resolver | None) -> Cluster | None:
    if resolver is not None:
        return from_resolver(resolver)
    text = os.environ.get("TF_CONFIG", "")
    cluster = read_tf_config(text)
    if not text or (cluster is not None and len(cluster.addresses) == 1):
        reason = "names one worker" if text else "is not set"
        _say(f"TF_CONFIG {reason}: this process trains alone.")
    return cluster


def _say(text: str) -> None:
    print(f"tfkfac: {text}", file=sys.stderr)


def _apart_if_evaluator(resolver: Resolver | None) -> Resolver | None:
    """An evaluator's resolver without the workers.

    With them TensorFlow ends the evaluator's collectives when one is gone.
    """
    own = resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if own.task_type != EVALUATOR:
        return resolver
    _say(
        "this process is an evaluator: it takes no part in the workers' "
        "training and trains alone."
    )
    apart = copy.copy(own)
    apart.cluster_spec = functools.partial(tf.train.ClusterSpec, {})
    return apart


def _check_timeout(timeout: float | None) -> None:
    message = (
        "Argument `start_timeout` must be a number of seconds above 0 or None. "
        f"Received: start_timeout={timeout!r} (of type {type(timeout)})"
    )
    if timeout is not None and not is_number(timeout):
        raise TypeError(message)
    if timeout is not None and not timeout > 0:
        raise ValueError(message)


def _warn_of_threads(options: Options | None) -> None:
    if options is not None and options.timeout_seconds:
        warnings.warn(
            "`CommunicationOptions(timeout_seconds=...)` makes TensorFlow 2.21 "
            "leave 6 to 8 sleeping threads a step behind, until a healthy job "
            "is aborted after some thousand steps. A worker that dies is "
            "noticed without it. Received: "
            f"timeout_seconds={options.timeout_seconds}",
            stacklevel=3,
        )
