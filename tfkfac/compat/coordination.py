"""TensorFlow's coordination service: key-value store and lost workers.

The first worker runs the service. All workers send heartbeats to it.
"""

import ctypes

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

# A worker without heartbeats for this time is lost. TensorFlow's default is 10.
HEARTBEAT_TIMEOUT_S = 4.0


def configure(cluster: tf.train.ClusterSpec) -> None:
    """Set the timeout of the heartbeats, before the first strategy is created.

    This relies on the strategy configuring the service only if it is not
    configured. The other settings equal the strategy's settings.
    """
    if context.context().coordination_service is not None:
        return
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(cluster),
        heartbeat_timeout_in_ms=int(1000 * HEARTBEAT_TIMEOUT_S),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(
                name=job, num_tasks=cluster.num_tasks(job)
            )
            for job in ("chief", "worker")
            if job in cluster.jobs
        ],
    )


def set_text(key: str, text: str) -> bool:
    """Store a text under a key; return False if the key has one already.

    The call waits without a limit while the first worker is suspended.

    Raises:
        tf.errors.OpError: If the first worker is gone.
    """
    try:
        context.context().set_config_key_value(key, text)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def get_text(key: str, seconds: float) -> str | None:
    """Wait up to `seconds` for the text of a key; None if there is none.

    Raises:
        tf.errors.OpError: If the first worker is gone.
    """
    timeout_ms = max(int(1000 * seconds), 1)  # a timeout of 0 would never end
    try:
        return str(context.context().get_config_key_value(key, timeout_ms))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def silent_workers() -> list[int]:
    """Return the workers without heartbeats. Call it on the first worker only.

    The call holds Python's global lock. On another worker it would suspend the
    process together with the first worker. This relies on the states of the
    tasks being None or an error, in the order of the configured jobs.

    `TFE_GetTaskStates` of TensorFlow 2.21 releases a borrowed reference to the
    class of each error. This function restores the reference: at a count of 0
    Python would free the class, and the process would crash.
    """
    jobs = context.context().coordination_service.coordinated_job_list
    states = context.context().get_task_states(
        [(job.name, job.num_tasks) for job in jobs]
    )
    silent = {i: error for i, error in enumerate(states) if error is not None}
    for error in silent.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(type(error)))
    return list(silent)


def abort_collectives(message: str) -> None:
    """Abort all running and future collectives of this process.

    Each collective raises a `tf.errors.UnavailableError` with the message. Any
    thread may call this function. This relies on `abort_collective_ops`.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
