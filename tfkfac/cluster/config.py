"""Read the workers of a job from `TF_CONFIG` or a cluster resolver."""

import dataclasses
import functools
import hashlib
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

# Task types that train, in the order of the worker indices.
TRAINING_TASKS = ("chief", "worker")
EVALUATOR = "evaluator"  # type of a task that does not train
_PARAMETER_SERVER = "ps"
# 4096 addresses of at most 263 bytes fit into one message of gRPC (4 MB).
MAX_WORKERS = 2**12
_MAX_RECEIVED_CHARS = 1000  # length of a malformed value in an error
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[\w.-]{1,253}))"
    r":(?P<port>[0-9]{1,5})"
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Addresses of the workers of a job, and the index of this process."""

    # "host:port" of each worker. Before the rendezvous, all addresses except
    # the first may be "".
    addresses: tuple[str, ...]
    index: int
    # Identity of the job, equal on all of its workers; "" if unknown.
    job: str = dataclasses.field(default="", compare=False)

    def name(self, index: int) -> str:
        """Return the name of a worker for messages."""
        address = self.addresses[index]
        return f"worker {index} at {address}" if address else f"worker {index}"


def read_tf_config(text: str, ray_job: str = "") -> Cluster | None:
    """Parse a value of `TF_CONFIG`; None if empty, or for an evaluator.

    The identity of the job is a hash of the addresses, with Ray's job id
    `ray_job` if Ray has set `TF_CONFIG`.
    """
    invalid = functools.partial(
        _invalid, "Environment variable `TF_CONFIG`", f"TF_CONFIG={text}"
    )
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"be JSON ({error})") from error
    if not isinstance(config, dict):
        raise invalid("be an object of JSON")
    task = config.get("task", {})
    if not isinstance(task, dict):
        raise invalid('have a "task" that is an object')
    if not config.get("cluster"):
        return None
    if not {"type", "index"} <= task.keys():
        raise invalid('have a "task" with a "type" and an "index"')
    cluster = _make_cluster(
        config["cluster"], task["type"], task["index"], invalid
    )
    if cluster is None or not ray_job:
        return cluster
    return dataclasses.replace(cluster, job=f"Ray {ray_job}, {cluster.job}")


def from_resolver(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> Cluster | None:
    """Return the cluster of a resolver, or None if it is incomplete."""
    spec = resolver.cluster_spec()
    task_type, index = resolver.task_type, resolver.task_id
    if not spec or task_type is None or index is None:
        return None
    jobs = spec.as_dict()
    invalid = functools.partial(
        _invalid,
        "Argument `cluster_resolver`",
        f"cluster_resolver={resolver} of {jobs}, task {task_type} {index}",
    )
    return _make_cluster(jobs, task_type, index, invalid)


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port"; remove the brackets of an IPv6 address."""
    match = _ADDRESS.fullmatch(address)
    valid = match is not None and 0 < int(match["port"]) < 2**16
    if match is not None and match["ipv6"]:
        try:
            ipaddress.IPv6Address(match["ipv6"])
        except ValueError:
            valid = False
    if match is None or not valid:
        raise ValueError(
            "An address must be 'host:port', or '[IPv6 address]:port'. "
            f"Received: {address[:_MAX_RECEIVED_CHARS]!r}"
        )
    return match["ipv6"] or match["host"], int(match["port"])


def _make_cluster(
    jobs: Any, task_type: str, index: Any, invalid: Callable[[str], ValueError]
) -> Cluster | None:
    """Validate the cluster and the task; return None for an evaluator."""
    if not isinstance(jobs, Mapping):
        raise invalid('have a "cluster" that is an object')
    if _PARAMETER_SERVER in (task_type, *jobs):
        raise invalid(
            f'have no task "{_PARAMETER_SERVER}": `tfkfac` has no parameter '
            "servers, every worker holds all weights. Remove them from the "
            "cluster and start none"
        )
    if task_type not in (*TRAINING_TASKS, EVALUATOR):
        raise invalid(
            f'have a task "type" of {", ".join(TRAINING_TASKS)} or {EVALUATOR}'
        )
    for listed in jobs.values():
        is_list = isinstance(listed, (list, tuple))
        if not is_list or not all(isinstance(x, str) for x in listed):
            raise invalid("list the addresses of its workers")
    addresses = [x for name in TRAINING_TASKS for x in jobs.get(name, [])]
    if len(addresses) > MAX_WORKERS:
        raise invalid(f"have at most {MAX_WORKERS} workers")
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise invalid(
                "name workers as 'host:port' or '[IPv6 address]:port'"
            ) from error
    if len(set(addresses)) < len(addresses):
        raise invalid("name no address twice")
    if task_type == EVALUATOR:
        return None
    num_tasks = len(jobs.get(task_type, []))
    if type(index) is not int or not 0 <= index < num_tasks:
        raise invalid(
            f'have a task "index" from 0 to {num_tasks - 1}, the number of '
            f'addresses of "{task_type}" less one'
        )
    offset = len(jobs.get("chief", [])) if task_type == "worker" else 0
    digest = hashlib.sha256("\n".join(addresses).encode()).hexdigest()
    return Cluster(tuple(addresses), offset + index, f"cluster {digest[:16]}")


def _invalid(name: str, received: str, requirement: str) -> ValueError:
    if len(received) > _MAX_RECEIVED_CHARS:
        received = f"{received[:_MAX_RECEIVED_CHARS]}..."
    return ValueError(f"{name} must {requirement}. Received: {received}")
