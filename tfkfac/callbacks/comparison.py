"""Comparisons of the workers, whose weights must be equal bit for bit.

Before training, all workers must be at the same epoch and update: a worker
that has loaded another backup would change the result or make the job hang.
During training the workers only exchange gradients. After a hardware error, a
worker would continue with different weights, without any message.
"""

import contextlib
import itertools
import secrets
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.data import (
    global_seed,
    label_checksums,
    reshuffle_arrays,
    shuffle_seeds,
)
from tfkfac.compat.optimizers import raw_iterations
from tfkfac.distributed.agreement import (
    check_agreement,
    exchange,
    find_differences,
    first_of,
    refuse_differences,
)
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import find_topology
from tfkfac.saving.entries import Spread
from tfkfac.shell.optimizer import SecondOrderOptimizer

# Counter of the calls of `fit`, a part of the seed of each call.
_fit_numbers = itertools.count()
# Batches between two comparisons. A comparison reads all weights and sends one
# message.
INTERVAL = 100
_LABELS_DIFFER = (
    "The labels of the first batch of a `PyDataset` differ between workers. "
    "Each worker takes its rows of every batch, so some rows may be missed and "
    "others come twice. If the `PyDataset` shuffles rows, call "
    "`keras.utils.set_random_seed` with the same seed on all workers before it "
    "is created."
)


@contextlib.contextmanager
def common_order(
    strategy: tf.distribute.Strategy, arguments: Mapping[str, Any]
) -> Iterator[list[keras.callbacks.Callback]]:
    """Context of a `fit` that compares the order of the data of all workers.

    All workers must enter it. Each worker takes its rows of each batch: in
    different orders, some rows are missed and others come twice. Only the seeds
    are compared, no data are read, and a difference raises a ValueError on all
    workers. The context also gives arrays a new order in each epoch and each
    `fit`, if the seed was set by the strategy.

    The order of a `PyDataset` is defined by the user's code. Therefore compare
    the labels of the first batch (random augmentation may change the inputs)
    and warn about a difference. Generators are not compared, because they may
    differ between workers. Yields additional callbacks for this `fit`.
    """
    topology = find_topology(strategy)
    if topology.processes == 1:
        yield []
        return
    group = Communicator(topology.process, topology.processes, "data")
    if not hasattr(strategy, "shuffle_seed"):
        # `tfkfac.MultiWorkerMirroredStrategy` sets a common seed in its
        # constructor, unless the user has set one. Under TensorFlow's strategy
        # the first `fit` sets it. This is early enough for arrays, but too late
        # for a `tf.data.Dataset` created before.
        proposal = {"seed": global_seed(), "random": secrets.randbits(31)}
        proposals = exchange(proposal, group)
        strategy.shuffle_seed = None
        if all(worker["seed"] is None for worker in proposals):
            strategy.shuffle_seed = int(proposals[0]["random"])
            tf.random.set_seed(strategy.shuffle_seed)
    seed, fit = strategy.shuffle_seed, next(_fit_numbers)
    shuffle = arguments.get("shuffle", True)
    x, validation = arguments.get("x"), arguments.get("validation_data")
    orders = {
        "x": _order_seeds(x, shuffle, group.rank),
        "validation_data": _order_seeds(validation, False, group.rank),
    }
    refuse_differences(
        "All workers must shuffle their data in the same order: each takes its "
        "rows of every batch. Call `keras.utils.set_random_seed` with the same "
        "seed on all workers before the strategy and the data, or use "
        "`shuffle=False`. If each worker has a `tf.data.Dataset` with rows of "
        "its own, set its `auto_shard_policy` to `AutoShardPolicy.OFF`. These "
        "seeds differ",
        exchange(orders, group),
    )

    def compare_labels(logs: Any = None) -> None:
        if find_differences(exchange({"checksums": checksums}, group)):
            warnings.warn(_LABELS_DIFFER, stacklevel=2)

    with contextlib.ExitStack() as stack:
        if seed is not None and seed == global_seed():
            seed_of_fit = zlib.crc32(f"{seed}, {fit}".encode())
            stack.enter_context(reshuffle_arrays(seed_of_fit))
        checksums = stack.enter_context(label_checksums())
        compare = keras.callbacks.LambdaCallback(on_train_begin=compare_labels)
        yield [compare] if isinstance(x, keras.utils.PyDataset) else []


def _order_seeds(data: Any, shuffle: Any, rank: int) -> list[Any]:
    """Return the seeds that define the order of an argument of `fit`."""
    unseeded = f"drawn by worker {rank}"
    data = getattr(data, "_original_dataset", data)  # unwrap if distributed
    if isinstance(data, keras.utils.PyDataset):
        return ["PyDataset"]
    if isinstance(data, tf.data.Dataset):
        seeds = shuffle_seeds(data)
        return [list(pair) if any(pair) else unseeded for pair in seeds]
    leaves = keras.tree.flatten(data)
    if shuffle and leaves and all(hasattr(x, "shape") for x in leaves):
        seed = global_seed()
        return [unseeded if seed is None else seed]
    return []


def compare_beginnings(
    optimizer: SecondOrderOptimizer, run: dict[str, Any]
) -> None:
    """Compare configuration and position before training, on all workers."""
    method, job = optimizer.method, optimizer.method.job
    group, rank = job.among_processes("begin"), job.topology.local[0]
    # Repeat the comparison of `build`: hyperparameters may have changed.
    check_agreement(optimizer.description(), group)
    counts = [
        entry.variable
        for entry in method.contents(rank).entries
        if entry.spread is Spread.REPLICATED and entry.variable.dtype.is_integer
    ]
    weights = job.model.trainable_variables
    inner = _common_variables(optimizer)[len(weights) :]
    position = {
        "updates": int(raw_iterations(job.inner_optimizer).numpy()),
        "digest of the weights": f"{_checksum(weights):08x}",
        "digest of the counters": f"{_checksum(counts):08x}",
        "digest of the inner optimizer": f"{_checksum(inner):08x}",
    }
    refuse_differences(
        "All workers must begin training at the same point. If they have "
        "been restarted, load the same backup on all of them: "
        "`tfkfac.callbacks.ChiefBackup`. These differ",
        exchange({**run, **position}, group),
    )


def compare_bits(optimizer: SecondOrderOptimizer) -> None:
    """Compare checksums of the weights after a step, on all workers."""
    job, variables = optimizer.method.job, _common_variables(optimizer)
    checksums = [_checksum([variable]) for variable in variables]
    with tf.device("CPU:0"):
        group = job.among_processes("comparison")
        rows = group.all_gather(tf.constant(checksums, tf.int64)).numpy()
    paths = [variable.path for variable in variables]
    by_worker = [
        {path: f"{x:08x}" for path, x in zip(paths, row, strict=True)}
        for row in rows
    ]
    if differences := find_differences(by_worker):
        raise RuntimeError(
            "The workers no longer have the same weights, so one of them has "
            f"computed or stored a wrong value. After {int(job.clock):,} "
            "updates these checksums differ: "
            f"{first_of(differences)}. Load an earlier backup."
        )


def _common_variables(optimizer: SecondOrderOptimizer) -> list[keras.Variable]:
    """Return the variables that are equal on all workers after each step."""
    method, job = optimizer.method, optimizer.method.job
    variables = list(job.model.trainable_variables)
    # Skip optimizer state with MR-DHO2: accelerators get only weights.
    if len(method.peers(job.topology.local[0])) == job.topology.replicas:
        variables += optimizer.variables
    return variables


def _checksum(variables: Iterable[Any]) -> int:
    """Return the CRC-32 of the values of all variables."""
    value = 0
    for variable in variables:
        value = zlib.crc32(np.asarray(variable.numpy()).tobytes(), value)
    return value
