"""The workers of a job, as `TF_CONFIG` or a cluster resolver names them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# The kinds of tasks that train together, in the order of their indices.
TRAINING = ("chief", "worker")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of all workers, and which of them this process is.

    Attributes:
        addresses: "host:port" of each worker.
        index: The number of this process among them.
    """

    addresses: tuple[str, ...]
    index: int

    @property
    def own_port(self) -> int:
        """The port at which this process is reached."""
        return split_address(self.addresses[self.index])[1]

    def name(self, index: int) -> str:
        """How messages call a worker."""
        return f"worker {index} at {self.addresses[index]}"


def read_tf_config(text: str) -> Cluster | None:
    """The cluster of a value of `TF_CONFIG`.

    Args:
        text: The value.

    Returns:
        The cluster; None if there is none, or if this process is none of those
        that train, as an evaluator.

    Raises:
        ValueError: If it is malformed. The message says where.
    """
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        raise _invalid(f"be JSON ({error})", text) from error
    if not isinstance(config, dict):
        raise _invalid("be an object of JSON", text)
    if not config.get("cluster"):
        return None
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise _invalid('have a "task" with a "type" and an "index"', text)
    return _cluster(config["cluster"], task["type"], task["index"], text)


def from_resolver(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> Cluster | None:
    """The cluster that a resolver finds, or None if it does not say it all."""
    spec = resolver.cluster_spec()
    kind, index = resolver.task_type, resolver.task_id
    if not spec or kind is None or index is None:
        return None
    named = spec.as_dict()
    return _cluster(named, kind, index, str(named))


def split_address(address: str) -> tuple[str, int]:
    """Host and port; the brackets of an IPv6 address are removed.

    Raises:
        ValueError: If it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"An address must be 'host:port'. Received: {address!r}"
        )
    return host.strip("[]"), int(port)


def _cluster(jobs: Any, kind: str, index: Any, received: str) -> Cluster | None:
    if not isinstance(jobs, Mapping):
        raise _invalid('have a "cluster" that is an object', received)
    lists = [jobs.get(name, []) for name in TRAINING]
    addresses = [one for part in lists for one in part]
    if not all(isinstance(part, (list, tuple)) for part in lists) or not all(
        isinstance(one, str) for one in addresses
    ):
        raise _invalid("list the addresses of its workers", received)
    for one in addresses:
        try:
            split_address(one)
        except ValueError as error:
            raise _invalid("name workers as 'host:port'", received) from error
    if len(set(addresses)) < len(addresses):
        raise _invalid("name no address twice", received)
    if kind not in TRAINING:
        return None
    own = jobs.get(kind, [])
    if type(index) is not int or not 0 <= index < len(own):
        raise _invalid(
            f'have a task "index" from 0 to {len(own) - 1}, the number of '
            f'addresses of "{kind}" less one',
            received,
        )
    before = len(jobs.get("chief", [])) if kind == "worker" else 0
    return Cluster(tuple(addresses), before + index)


def _invalid(what: str, received: str) -> ValueError:
    return ValueError(
        f"Environment variable `TF_CONFIG` must {what}. "
        f"Received: TF_CONFIG={received}"
    )
