"""`MultiWorkerMirroredStrategy` that works with Keras 3."""

import contextlib
import copy
import functools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import tensorflow as tf
from typing_extensions import override

from tfkfac.checks import check_positive, if_given
from tfkfac.cluster.config import (
    EVALUATOR,
    Cluster,
    from_resolver,
    read_tf_config,
    split_address,
)
from tfkfac.cluster.events import EventLog
from tfkfac.cluster.launchers import KERAS, find_cluster
from tfkfac.cluster.rendezvous import wait_for_all
from tfkfac.cluster.stopping import Stopping
from tfkfac.cluster.waiting import print_line
from tfkfac.cluster.watch import StallDetector, Watch
from tfkfac.compat import coordination
from tfkfac.compat.data import global_seed
from tfkfac.compat.strategies import call_unconverted, keep_handler, repair

Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver
Options: TypeAlias = tf.distribute.experimental.CommunicationOptions

_REMINDER_S = 20.0  # until the start of TensorFlow is reported as late


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers, with Keras 3.

    This class is `tf.distribute.MultiWorkerMirroredStrategy` with a `reduce`
    that accepts the arguments of Keras. With TensorFlow's class, `fit` and
    `evaluate` fail on several workers with every optimizer
    (keras-team/keras#20585).

    Every worker runs the same program, and creates one strategy before it
    calls any other function of TensorFlow. The addresses of the workers and
    the index of this worker come from the environment variable `TF_CONFIG`,
    or from the launcher: srun, mpirun, torchrun, a Kubernetes Indexed Job, or
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `_NUM_PROCESSES` and `_PROCESS_ID`.
    Without any of them there is one worker. The constructor prints the source.

    The constructor waits until all workers have called it, and prints the
    missing workers. Later, each worker detects within seconds that another
    worker has failed or was killed: `fit` and `evaluate` raise a
    `RuntimeError` with the name of that worker and the cause; in `predict` and
    in custom training loops the error of the collective contains them. If no
    step of `fit` ends for a minute, each worker prints the functions that it is
    executing; no slow worker is ended.

    On several workers the constructor calls `tf.random.set_seed` with a random
    seed that is equal on all workers, unless a seed is set. Each worker reads
    its rows of each batch, so all must shuffle in the same order. Create
    datasets after the strategy.

    The strategy keeps the handler of SIGTERM: by default, SIGTERM ends the
    process. (TensorFlow's strategy makes a process ignore SIGTERM.) If a
    worker is killed before the first step, all others receive SIGTERM.

    A task of type "evaluator" runs alone, and prints that it does.

    Args:
        cluster_resolver: Resolver of the workers. Defaults to `TF_CONFIG`.
        communication_options: Options of TensorFlow's collectives. Leave
            `timeout_seconds` unset: TensorFlow 2.21 leaks threads with it.
        coordinator: Address of worker 0, "host:port"; the other workers send
            their addresses to it. Defaults to the launcher's value.
        num_processes: Number of workers. Defaults to the launcher's value.
        process_id: Index of this worker. Defaults to the launcher's value.
        start_timeout: Seconds to wait for the other workers to start; None
            for no limit. Defaults to 600.

    Raises:
        TimeoutError: If a worker has not started in time. The message names
            it.
        ValueError: If `TF_CONFIG` or the resolver is malformed or has
            parameter servers; if the launcher does not provide all settings;
            if a variable of another launcher counts several processes; if
            worker 0 refuses this process, because it has other workers,
            another job or secret (environment variable `TFKFAC_SECRET`), or
            the index of another process; or if this process has created a
            strategy of several workers before.

    Example:
    ```python
    # On the second of two workers, before the program starts:
    # TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]},
    #             "task": {"type": "worker", "index": 1}}'
    strategy = tfkfac.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer=tfkfac.KFAC(), loss="mse")
    # The batch size of the dataset is the total of all workers.
    model.fit(dataset, epochs=10)
    ```
    """

    _is_created = False  # True if this process has a strategy of many workers
    # None if there is one worker.
    watch: Watch | None = None
    stopping: Stopping | None = None
    stall_detector: StallDetector | None = None
    shuffle_seed: int | None = None  # None if the user has set a seed

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
        if_given(check_positive, "start_timeout", start_timeout)
        if communication_options and communication_options.timeout_seconds:
            warnings.warn(
                "`CommunicationOptions(timeout_seconds=...)` makes TensorFlow "
                "2.21 leave 6 to 8 sleeping threads a step behind, until a "
                "healthy job is aborted after some thousand steps. A worker "
                "that dies is noticed without it. Received: timeout_seconds="
                f"{communication_options.timeout_seconds}",
                stacklevel=2,
            )
        given = zip(
            KERAS, (coordinator, num_processes, process_id), strict=True
        )
        settings = {name: value for name, value in given if value is not None}
        cluster, resolver = _find_cluster(cluster_resolver, settings)
        size = 1 if cluster is None else len(cluster.addresses)
        if size > 1 and MultiWorkerMirroredStrategy._is_created:
            raise ValueError(
                "A process can create one `MultiWorkerMirroredStrategy` of "
                "several workers: TensorFlow's collectives would fail with "
                "another one. Use the first strategy again, or restart all "
                "processes."
            )
        if cluster is not None:
            cluster, seed = wait_for_all(cluster, start_timeout)
            if seed is not None and global_seed() is None:
                # With a common seed all workers shuffle in the same order.
                tf.random.set_seed(seed)
                self.shuffle_seed = seed
            if resolver is None:
                resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                    tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
                    task_type="worker",
                    task_id=cluster.index,
                    rpc_layer="grpc",
                )
                _share_gpus(cluster)
            # With a web proxy, gRPC would hang: add the workers to
            # `no_grpc_proxy`.
            get = os.environ.get
            current_hosts = get("no_grpc_proxy") or get("no_proxy") or ""
            hosts = (split_address(address)[0] for address in cluster.addresses)
            unproxied = filter(None, dict.fromkeys([current_hosts, *hosts]))
            os.environ.update(no_grpc_proxy=",".join(unproxied))
            coordination.configure(resolver.cluster_spec())
        with keep_handler(signal.SIGTERM), _reminder(size):
            super().__init__(resolver, communication_options)
            repair(self)
        if cluster is not None and size > 1:
            MultiWorkerMirroredStrategy._is_created = True
            log = EventLog(cluster.index, size)
            self.watch = Watch(cluster, log)
            self.stopping = Stopping(log)
            self.stall_detector = StallDetector(cluster.name(cluster.index))
            log.start(self.watch, self.stopping, self.stall_detector)

    @override
    @call_unconverted
    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Call a function on each replica, as `tf.distribute.Strategy.run`.

        Args:
            fn: The function.
            args: Its positional arguments. Each replica receives its component
                of a per-replica value. Defaults to `()`.
            kwargs: Its keyword arguments, treated like `args`. Defaults to
                None.
            options: A `tf.distribute.RunOptions`. Defaults to None.

        Returns:
            The result of the function; with several local replicas, a
            per-replica value.
        """
        if self.watch is not None:
            self.watch.has_started = True
        return super().run(fn, args, kwargs, options)


@contextlib.contextmanager
def _reminder(size: int) -> Iterator[None]:
    """Print a line if TensorFlow's start takes long: it has no time limit."""
    timer = threading.Timer(
        _REMINDER_S,
        print_line,
        [
            f"all {size} workers have joined, but TensorFlow has not started "
            f"after {_REMINDER_S:g} s: another worker may have failed since."
        ],
    )
    timer.daemon = True
    if size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _find_cluster(
    resolver: Resolver | None, settings: Mapping[str, Any]
) -> tuple[Cluster | None, Resolver | None]:
    """Return the cluster, and the resolver of the user or `TF_CONFIG`."""
    tf_config = "" if settings else os.environ.get("TF_CONFIG", "")
    if settings and resolver is not None:
        raise ValueError(
            "Argument `cluster_resolver` must be None if `coordinator`, "
            "`num_processes` or `process_id` is given. Received: "
            f"cluster_resolver={resolver}, {settings}"
        )
    if resolver is not None:
        cluster, source = from_resolver(resolver), "argument `cluster_resolver`"
    elif tf_config:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        ray_job = os.environ.get("RAY_JOB_ID", "")
        cluster, source = read_tf_config(tf_config, ray_job), "TF_CONFIG"
    else:
        cluster, source = find_cluster(os.environ, settings)
    if resolver is not None and resolver.task_type == EVALUATOR:
        print_line(
            "this process is an evaluator: it takes no part in the workers' "
            "training and trains alone."
        )
        # Remove the workers: TensorFlow would abort the collectives of the
        # evaluator when a worker ends.
        resolver = copy.copy(resolver)
        resolver.cluster_spec = functools.partial(tf.train.ClusterSpec, {})
        return None, resolver
    size = 1 if cluster is None else len(cluster.addresses)
    if cluster is None or size == 1:
        print_line(f"this process trains alone: {source}.")
    else:
        print_line(
            f"worker {cluster.index} of {size} by {source}; worker 0 is at "
            f"{cluster.addresses[0]}."
        )
    return cluster, resolver


def _share_gpus(cluster: Cluster) -> None:
    """Divide the GPUs of a host among its workers."""
    hosts = [split_address(address)[0] for address in cluster.addresses]
    local = [i for i, host in enumerate(hosts) if host == hosts[cluster.index]]
    # If the launcher has assigned GPUs, a worker sees fewer GPUs than the host
    # has workers, or Slurm sets `SLURM_GPUS_PER_TASK`.
    gpus = tf.config.get_visible_devices("GPU")
    count = len(gpus) // len(local)
    if len(local) > 1 and count and "SLURM_GPUS_PER_TASK" not in os.environ:
        first = count * local.index(cluster.index)
        tf.config.set_visible_devices(gpus[first : first + count], "GPU")
