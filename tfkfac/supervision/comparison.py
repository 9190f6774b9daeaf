"""Comparisons of all workers, which must have the same bits.

They begin only if all are at the same point: a worker that has gone back to
another backup than the others would train on in silence, or hang all of them.
Then they add up their gradients and go on alone. After a fault of memory or of
a processor one of them would train on with other weights, and nobody would
know.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.optimizers import raw_iterations
from tfkfac.distributed.agreement import (
    check_agreement,
    exchange,
    find_differences,
    first_of,
)
from tfkfac.saving.entries import Spread
from tfkfac.shell.optimizer import SecondOrderOptimizer

# Batches between two comparisons: each takes a message, and to read all that is
# compared.
EVERY = 100


def compare_beginnings(
    optimizer: SecondOrderOptimizer, run: dict[str, Any]
) -> None:
    """Compares the workers before the first epoch; all of them call it.

    The run is the epochs and steps that `fit` is to do.

    Raises:
        ValueError: On all of them, if they differ.
    """
    group = optimizer.method.job.among_processes("begin")
    # Again: much of it may have changed since the optimizer was built.
    check_agreement(optimizer.description(), group)
    refuse_differences(
        "All workers must begin training at the same point. If they have "
        "been restarted, let them go back to one backup: "
        "`tfkfac.callbacks.ChiefBackup`. These differ",
        exchange({**run, **_position(optimizer)}, group),
    )


def compare_bits(optimizer: SecondOrderOptimizer) -> None:
    """Compares the workers after a step; all of them call it.

    Raises:
        RuntimeError: On all of them, if they differ. The message says in
            what.
    """
    job, variables = optimizer.method.job, _common_variables(optimizer)
    own = [_checksum([variable]) for variable in variables]
    with tf.device("CPU:0"):
        group = job.among_processes("comparison")
        rows = group.all_gather(tf.constant(own, tf.int64)).numpy()
    paths = [variable.path for variable in variables]
    sums = [[f"{number:08x}" for number in row] for row in rows]
    differences = find_differences(
        [dict(zip(paths, row, strict=True)) for row in sums]
    )
    if differences:
        raise RuntimeError(
            "The workers no longer have the same weights, so one of them has "
            f"computed or kept something wrong. After {int(job.clock):,} "
            "updates these checksums differ: "
            f"{first_of(differences)}. Go back to a backup of before."
        )


def refuse_differences(
    message: str, descriptions: Sequence[dict[str, Any]]
) -> None:
    """Raises, on every worker, if their descriptions are not the same.

    Raises:
        ValueError: With the message and the first difference.
    """
    differences = find_differences(descriptions)
    if differences:
        raise ValueError(f"{message}: {first_of(differences)}")


def _position(optimizer: SecondOrderOptimizer) -> dict[str, Any]:
    """The point at which training is, in few numbers."""
    method, job = optimizer.method, optimizer.method.job
    rank = job.topology.local[0]
    counts = [
        entry.variable
        for entry in method.contents(rank).entries
        if entry.spread is Spread.REPLICATED and entry.variable.dtype.is_integer
    ]
    weights = job.model.trainable_variables
    own = _common_variables(optimizer)[len(weights) :]
    return {
        "updates": int(raw_iterations(job.inner_optimizer).numpy()),
        "digest of the weights": f"{_checksum(weights):08x}",
        "digest of the counters": f"{_checksum(counts):08x}",
        "digest of the inner optimizer": f"{_checksum(own):08x}",
    }


def _common_variables(optimizer: SecondOrderOptimizer) -> list[keras.Variable]:
    """Variables of which all workers have the same bits after each step."""
    method, job = optimizer.method, optimizer.method.job
    weights = list(job.model.trainable_variables)
    # Accelerators get the weights only.
    if len(method.peers(job.topology.local[0])) == job.topology.replicas:
        weights += optimizer.variables
    return weights


def _checksum(variables: Iterable[Any]) -> int:
    """A number of 32 bits that variables with other bits hardly share."""
    value = 0
    for variable in variables:
        value = zlib.crc32(np.asarray(variable.numpy()).tobytes(), value)
    return value
