"""`MultiWorkerMirroredStrategy` for Keras 3."""

import copy
import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf
from typing_extensions import override

from tfkfac.checks import is_number
from tfkfac.cluster.channel import Channel, Line
from tfkfac.cluster.config import (
    EVALUATOR,
    Cluster,
    from_resolver,
    read_tf_config,
    split_address,
)
from tfkfac.cluster.launchers import KERAS, find_cluster
from tfkfac.cluster.rendezvous import wait_for_all
from tfkfac.cluster.stopping import Stopping
from tfkfac.cluster.watch import Standstill, Watch
from tfkfac.compat.data import global_seed
from tfkfac.compat.strategies import ReducingStrategy, keep_handler

Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver
Options: TypeAlias = tf.distribute.experimental.CommunicationOptions


class MultiWorkerMirroredStrategy(ReducingStrategy):
    """Synchronous training on several workers, with Keras 3.

    This is `tf.distribute.MultiWorkerMirroredStrategy` with a `reduce` that
    takes what Keras passes to it; with the original, `fit` and `evaluate` fail
    on several workers, whatever the optimizer (keras-team/keras#20585).

    Every worker runs the same program. It creates the strategy before anything
    else of TensorFlow, and only one. A worker learns who it is from the
    environment variable `TF_CONFIG`, or from the launcher: srun, mpirun,
    torchrun, an Indexed Job of Kubernetes, or
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `_NUM_PROCESSES` and `_PROCESS_ID`.
    Without any there is one worker. A line says what was found.

    The workers wait for each other here, and say for whom. From then on each
    learns within seconds if another one fails or is gone, also while it waits
    for it: `fit` and `evaluate` raise a `RuntimeError` that names it and the
    cause, and in `predict` and a loop of your own the error of the collective
    does. A worker that is slow is left alone; when no step of `fit` ends for a
    minute, the first worker says in which functions each of them is.

    On several workers it calls `tf.random.set_seed` with a random seed that
    all have in common, unless there is a seed: each worker takes its rows of
    each batch, so all of them must shuffle alike. Create datasets after it.

    SIGTERM does what it did before the strategy: a process without a handler
    of its own ends. (TensorFlow's strategy alone makes a process ignore it.)
    A worker that is killed before the first step ends all others by SIGTERM.

    A task of type "evaluator" takes no part in this: it is alone, and says so.

    Args:
        cluster_resolver: Where to find the workers, `TF_CONFIG` by default.
        communication_options: Options of TensorFlow's collectives. Leave
            `timeout_seconds` unset: TensorFlow 2.21 leaks threads with it.
        coordinator: Address of worker 0, "host:port". The other workers tell
            it theirs. Defaults to what the launcher says, as the next two.
        num_processes: How many workers there are.
        process_id: Index of this worker.
        start_timeout: Seconds that a worker waits for the others to start;
            None is for ever. Defaults to 600.

    Raises:
        TimeoutError: If a worker has not started in time. The message names
            it.
        ValueError: If `TF_CONFIG` or the resolver is malformed, has parameter
            servers; if a launcher does not say all that is needed; or if
            worker 0 refuses this process, because it has other workers,
            another job or secret (environment variable `TFKFAC_SECRET`), or
            the index of another process.

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
    shuffle_seed: int | None = None  # where the user has set none

    def __init__(
        self,
        cluster_resolver: Resolver | None = None,
        communication_options: Options | None = None,
        *,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        start_timeout: float | None = 600.0,
    ) -> None:
        _check_timeout(start_timeout)
        _warn_of_threads(communication_options)
        values = zip(
            KERAS, (coordinator, num_processes, process_id), strict=True
        )
        given = {name: value for name, value in values if value is not None}
        cluster, resolver = _find_cluster(cluster_resolver, given)
        lines: dict[int, Line] = {}
        if cluster is not None:
            cluster, lines, seed = wait_for_all(cluster, start_timeout)
            if seed is not None and global_seed() is None:
                # Otherwise each worker shuffles its data for itself.
                tf.random.set_seed(seed)
                self.shuffle_seed = seed
            if resolver is None:
                resolver = _resolver(cluster)
                _share_gpus(cluster)
            _bypass_proxy(cluster)
        with keep_handler(signal.SIGTERM):
            super().__init__(resolver, communication_options)
        if cluster is not None and lines:
            size = len(cluster.addresses)
            names = [cluster.name(index) for index in range(size)]
            channel = Channel(cluster.index, size, lines)
            self.watch = Watch(cluster, channel)
            self.stopping = Stopping(channel)
            self.standstill = Standstill(names, channel)
            channel.start(self.watch, self.stopping, self.standstill)

    @override
    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Calls a function on each replica, as `tf.distribute.Strategy.run`.

        Args:
            fn: The function.
            args: Its arguments; those of each replica where they differ.
            kwargs: Its keyword arguments, likewise.
            options: A `tf.distribute.RunOptions`.

        Returns:
            The result, or the results by replica.
        """
        if self.watch is not None:
            self.watch.has_begun = True
        return super().run(fn, args, kwargs, options)


def _find_cluster(
    resolver: Resolver | None, given: Mapping[str, Any]
) -> tuple[Cluster | None, Resolver | None]:
    """The cluster, and TensorFlow's resolver if that knows it already.

    Raises:
        ValueError: If the cluster is given twice, or malformed.
    """
    text = "" if given else os.environ.get("TF_CONFIG", "")
    if given and resolver is not None:
        raise ValueError(
            "Argument `cluster_resolver` must be None beside others of the "
            f"cluster. Received: cluster_resolver={resolver}, {given}"
        )
    if resolver is not None:
        cluster, where = from_resolver(resolver), "argument `cluster_resolver`"
    elif text:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        ray_job = os.environ.get("RAY_JOB_ID", "")
        cluster, where = read_tf_config(text, ray_job), "TF_CONFIG"
    else:
        cluster, where = find_cluster(os.environ, given)
    if resolver is not None and resolver.task_type == EVALUATOR:
        return None, _apart(resolver)
    size = 1 if cluster is None else len(cluster.addresses)
    if cluster is None or size == 1:
        _say(f"this process trains alone: {where}.")
    else:
        first = cluster.addresses[0]
        _say(
            f"worker {cluster.index} of {size} by {where}; worker 0 is at "
            f"{first}."
        )
    return cluster, resolver


def _say(text: str) -> None:
    print(f"tfkfac: {text}", file=sys.stderr)


def _apart(own: Resolver) -> Resolver:
    """An evaluator's resolver without the workers.

    With them TensorFlow ends the evaluator's collectives when one is gone.
    """
    _say(
        "this process is an evaluator: it takes no part in the workers' "
        "training and trains alone."
    )
    apart = copy.copy(own)
    apart.cluster_spec = functools.partial(tf.train.ClusterSpec, {})
    return apart


def _resolver(cluster: Cluster) -> Resolver:
    """A cluster in TensorFlow's words."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
        task_type="worker",
        task_id=cluster.index,
        rpc_layer="grpc",
    )


def _bypass_proxy(cluster: Cluster) -> None:
    """Lets TensorFlow reach the workers where there is a proxy for the web.

    It would ask that for them, and wait for ever.
    """
    known = (os.environ.get(name) for name in ("no_grpc_proxy", "no_proxy"))
    hosts = (split_address(address)[0] for address in cluster.addresses)
    direct = dict.fromkeys([next(filter(None, known), ""), *hosts])
    os.environ.update(no_grpc_proxy=",".join(filter(None, direct)))


def _share_gpus(cluster: Cluster) -> None:
    """Leaves a worker its part of the GPUs, if its host has several workers.

    A launcher that has given each its own shows it fewer than there are
    workers; Slurm says so.
    """
    hosts = [split_address(address)[0] for address in cluster.addresses]
    here = [i for i, host in enumerate(hosts) if host == hosts[cluster.index]]
    gpus = tf.config.get_visible_devices("GPU")
    share = len(gpus) // len(here)
    if len(here) > 1 and share and "SLURM_GPUS_PER_TASK" not in os.environ:
        first = share * here.index(cluster.index)
        tf.config.set_visible_devices(gpus[first : first + share], "GPU")


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
