"""A check, before the first step, that all workers run the same job.

A worker with another model or other settings would send tensors that the
others do not expect, which hangs all of them.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.distributed.collectives import Communicator

_SHOWN = 4


def check_agreement(
    description: Mapping[str, Any], communicator: Communicator
) -> None:
    """Compares a description of the job with those of the other workers.

    Every worker has to call it; each of them raises.

    Raises:
        ValueError: If descriptions differ. The message says where.
    """
    theirs = exchange(description, communicator)
    differences = find_differences(theirs)
    if differences:
        raise ValueError(
            "All workers must train the same model with the same optimizer. "
            f"Seen from worker {communicator.rank}, these differ: "
            f"{first_of(differences)}"
        )


def exchange(
    description: Mapping[str, Any], communicator: Communicator
) -> list[dict[str, Any]]:
    """Descriptions by worker, of anything that JSON can hold.

    Every worker has to call it.
    """
    own = encode(description)
    # On GPUs too: no kernel of theirs knows what is sent.
    with tf.init_scope(), tf.device("CPU:0"):
        sizes = communicator.all_gather(tf.constant([len(own)])).numpy()[:, 0]
        padded = np.pad(own, (0, sizes.max() - len(own)))
        rows = communicator.all_gather(tf.constant(padded)).numpy()
    return [decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def encode(description: Mapping[str, Any]) -> np.ndarray:
    """A description as an array."""
    text = json.dumps(description, default=str)
    data = zlib.compress(text.encode())
    # TensorFlow gathers no bytes.
    return np.frombuffer(data, np.uint8).astype(np.int32)


def decode(array: np.ndarray) -> dict[str, Any]:
    """Inverse of `encode`."""
    data = np.asarray(array, np.uint8).tobytes()
    result: dict[str, Any] = json.loads(zlib.decompress(data))
    return result


def find_differences(descriptions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names and values of the entries in which descriptions differ."""
    names = dict.fromkeys(name for d in descriptions for name in d)
    differences = []
    for name in names:
        values = [d.get(name) for d in descriptions]
        if any(value != values[0] for value in values):
            differences.append(f"{name}: {_describe(values)}")
    return differences


def first_of(differences: Sequence[str]) -> str:
    """The first differences: one is often followed by a host of others."""
    rest = len(differences) - _SHOWN
    more = [f"and {rest} more"] if rest > 0 else []
    return "; ".join([*differences[:_SHOWN], *more])


def _describe(values: Sequence[Any]) -> str:
    """The values by worker; of lists, only entries that others lack."""
    if not all(isinstance(value, list) for value in values):
        return _by_worker(values)
    lists: Sequence[list[Any]] = values
    own = [
        [entry for entry in mine if any(entry not in other for other in lists)]
        for mine in lists
    ]
    if not any(own):
        return "in another order"
    return _by_worker(own)


def _by_worker(values: Sequence[Any]) -> str:
    return ", ".join(f"{v!r} on worker {i}" for i, v in enumerate(values))
