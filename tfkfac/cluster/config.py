"""The workers of a job, from `TF_CONFIG` or a cluster resolver."""

import dataclasses
import functools
import hashlib
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

# The kinds of tasks that train together, in the order of their indices.
TRAINING = ("chief", "worker")
# The kind that looks on, by itself.
EVALUATOR = "evaluator"
_SERVER = "ps"
# All addresses, of at most 263 bytes, fit into one line of `channel.py`.
MOST_WORKERS = 2**12
_LONGEST_RECEIVED = 1000  # characters of a malformed value in a message
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[\w.-]{1,253}))"
    r":(?P<port>[0-9]{1,5})"
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers' addresses, "host:port", and the index of this process.

    Before the workers have met, addresses may be empty but for the first.

    Attributes:
        addresses: "host:port" of each worker.
        index: Index of this process.
        job: Identity of the job, equal on all of its workers; "" if unknown.
    """

    addresses: tuple[str, ...]
    index: int
    job: str = dataclasses.field(default="", compare=False)

    def name(self, index: int) -> str:
        """The name of a worker in messages."""
        address = self.addresses[index]
        return f"worker {index} at {address}" if address else f"worker {index}"


def read_tf_config(text: str, ray_job: str = "") -> Cluster | None:
    """The cluster of a value of `TF_CONFIG`; None if there is none.

    An evaluator has none either: it does not train with the others. The
    identity of the job is a hash of the addresses, with Ray's number of the
    job if Ray has set `TF_CONFIG`.

    Raises:
        ValueError: If it is malformed, or has parameter servers. The message
            says where.
    """
    invalid = functools.partial(
        _invalid, "Environment variable `TF_CONFIG`", f"TF_CONFIG={text}"
    )
    try:
        config = json.loads(text or "{}")
    except RecursionError as error:
        raise invalid("be JSON of at most a few levels") from error
    except ValueError as error:
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
    cluster = _cluster(config["cluster"], task["type"], task["index"], invalid)
    if cluster is None or not ray_job:
        return cluster
    job = f"Ray {ray_job}, {cluster.job}"
    return dataclasses.replace(cluster, job=job)


def from_resolver(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> Cluster | None:
    """The cluster of a resolver, or None if that is incomplete.

    Raises:
        ValueError: As from `read_tf_config`.
    """
    spec = resolver.cluster_spec()
    kind, index = resolver.task_type, resolver.task_id
    if not spec or kind is None or index is None:
        return None
    named = spec.as_dict()
    invalid = functools.partial(
        _invalid,
        "Argument `cluster_resolver`",
        f"cluster_resolver={resolver} of {named}, task {kind} {index}",
    )
    return _cluster(named, kind, index, invalid)


def split_address(address: str) -> tuple[str, int]:
    """Host and port; the brackets of an IPv6 address are removed.

    Raises:
        ValueError: If it is no address, or an IPv6 address has no brackets.
    """
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
            f"Received: {address[:_LONGEST_RECEIVED]!r}"
        )
    return match["ipv6"] or match["host"], int(match["port"])


def _cluster(
    jobs: Any, kind: str, index: Any, invalid: Callable[[str], ValueError]
) -> Cluster | None:
    if not isinstance(jobs, Mapping):
        raise invalid('have a "cluster" that is an object')
    if _SERVER in (kind, *jobs):
        raise invalid(
            f'have no task "{_SERVER}": `tfkfac` has no parameter servers, '
            "every worker holds all weights. Remove them from the cluster and "
            "start none"
        )
    if kind not in (*TRAINING, EVALUATOR):
        raise invalid(
            f'have a task "type" of {", ".join(TRAINING)} or {EVALUATOR}'
        )
    lists = [jobs.get(name, []) for name in TRAINING]
    if not all(
        isinstance(section, (list, tuple))
        for section in (*lists, *jobs.values())
    ):
        raise invalid("list the addresses of its workers")
    addresses = [address for section in lists for address in section]
    if not all(isinstance(address, str) for address in addresses):
        raise invalid("list the addresses of its workers")
    if len(addresses) > MOST_WORKERS:
        raise invalid(f"have at most {MOST_WORKERS} workers")
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise invalid(
                "name workers as 'host:port' or '[IPv6 address]:port'"
            ) from error
    if len(set(addresses)) < len(addresses):
        raise invalid("name no address twice")
    if kind == EVALUATOR:
        return None
    own = jobs.get(kind, [])
    if type(index) is not int or not 0 <= index < len(own):
        raise invalid(
            f'have a task "index" from 0 to {len(own) - 1}, the number of '
            f'addresses of "{kind}" less one'
        )
    before = len(jobs.get("chief", [])) if kind == "worker" else 0
    digest = hashlib.sha256("\n".join(addresses).encode()).hexdigest()
    job = f"cluster {digest[:16]}"
    return Cluster(tuple(addresses), before + index, job)


def _invalid(name: str, received: str, what: str) -> ValueError:
    if len(received) > _LONGEST_RECEIVED:
        received = f"{received[:_LONGEST_RECEIVED]}..."
    return ValueError(f"{name} must {what}. Received: {received}")
