"""What all workers must have the same bits of, compared from time to time.

They add up their gradients and then go on alone. After a fault of memory or of
a processor one of them would train on with other weights, and nobody would
know.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.distributed.agreement import find_differences, first_of
from tfkfac.shell.optimizer import SecondOrderOptimizer

# Batches between two comparisons: each takes a message, and to read all that is
# compared.
EVERY = 100


class Comparison(keras.callbacks.Callback):
    """Compares the workers now and then, and where an epoch ends.

    It is on all workers, before the callbacks that save.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: SecondOrderOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._batches = 0

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % EVERY == 0:
            compare(self._optimizer)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        compare(self._optimizer)


def compare(optimizer: SecondOrderOptimizer) -> None:
    """Compares this worker with the others; all of them have to call it.

    Raises:
        RuntimeError: On all of them, if they differ. The message says in
            what.
    """
    job, variables = optimizer.method.job, in_common(optimizer)
    own = [checksum([variable]) for variable in variables]
    with tf.device("CPU:0"):
        group = job.among_processes("comparison")
        rows = group.all_gather(tf.constant(own, tf.int64)).numpy()
    paths = [variable.path for variable in variables]
    differences = find_differences(
        [
            {p: f"{n:08x}" for p, n in zip(paths, row, strict=True)}
            for row in rows
        ]
    )
    if differences:
        raise RuntimeError(
            "The workers no longer have the same weights, so one of them has "
            f"computed or kept something wrong. After {int(job.clock):,} "
            "updates these checksums differ: "
            f"{first_of(differences)}. Go back to a backup of before."
        )


def in_common(optimizer: SecondOrderOptimizer) -> list[keras.Variable]:
    """What all workers have the same bits of after each step."""
    method, job = optimizer.method, optimizer.method.job
    weights = list(job.model.trainable_variables)
    # Accelerators get the weights only.
    if len(method.peers(job.topology.local[0])) == job.topology.replicas:
        weights += job.inner_optimizer.variables
    return weights


def checksum(variables: Iterable[Any]) -> int:
    """A number of 32 bits that variables with other bits hardly share."""
    value = 0
    for variable in variables:
        value = zlib.crc32(np.asarray(variable.numpy()).tobytes(), value)
    return value
