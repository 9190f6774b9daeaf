"""Check before the first step that all workers run the same job.

A worker with another model or other settings would send tensors of unexpected
shapes, and all workers would hang.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.distributed.collectives import Communicator

_MAX_SHOWN = 4  # differences in an error message


def check_agreement(
    description: Mapping[str, Any], communicator: Communicator
) -> None:
    """Raise a ValueError on all workers if their descriptions differ.

    Every worker must call this function.
    """
    refuse_differences(
        "All workers must train the same model with the same optimizer. Seen "
        f"from worker {communicator.rank}, these differ",
        exchange(description, communicator),
    )


def refuse_differences(
    message: str, descriptions: Sequence[Mapping[str, Any]]
) -> None:
    """Raise an error on every worker if the workers' descriptions differ."""
    if differences := find_differences(descriptions):
        raise ValueError(f"{message}: {first_of(differences)}")


def exchange(
    description: Mapping[str, Any], communicator: Communicator
) -> list[dict[str, Any]]:
    """Gather a description from every worker, by rank; all must call this."""
    text = json.dumps(description, default=str)
    # Widen the bytes: TensorFlow cannot gather uint8.
    data = np.frombuffer(zlib.compress(text.encode()), np.uint8)
    local = data.astype(np.int32)
    # Use the CPU, because GPUs have no kernel for this dtype.
    with tf.init_scope(), tf.device("CPU:0"):
        sizes = communicator.all_gather(tf.constant([len(local)])).numpy()[:, 0]
        padded = np.pad(local, (0, sizes.max() - len(local)))
        rows = communicator.all_gather(tf.constant(padded)).numpy()
    return [
        json.loads(zlib.decompress(row[:size].astype(np.uint8).tobytes()))
        for row, size in zip(rows, sizes, strict=True)
    ]


def find_differences(
    descriptions: Sequence[Mapping[str, Any]],
    sources: Sequence[str] | None = None,
) -> list[str]:
    """List the entries that differ, as text, with the `sources` of values."""
    sources = sources or [f"on worker {i}" for i in range(len(descriptions))]
    names = dict.fromkeys(name for d in descriptions for name in d)
    differences = []
    for name in names:
        values = [d.get(name) for d in descriptions]
        if any(value != values[0] for value in values):
            differences.append(f"{name}: {_describe(values, sources)}")
    return differences


def first_of(differences: Sequence[str]) -> str:
    """Join the first `_MAX_SHOWN` differences to one text."""
    num_hidden = len(differences) - _MAX_SHOWN
    more = [f"and {num_hidden} more"] if num_hidden > 0 else []
    return "; ".join([*differences[:_MAX_SHOWN], *more])


def _describe(values: Sequence[Any], sources: Sequence[str]) -> str:
    """Format the values of all sources; omit list entries common to all."""
    if all(isinstance(value, list) for value in values):
        values = [
            [entry for entry in local if any(entry not in x for x in values)]
            for local in values
        ]
        if not any(values):
            return "in another order"
    pairs = zip(values, sources, strict=True)
    return ", ".join(f"{value!r} {source}" for value, source in pairs)
