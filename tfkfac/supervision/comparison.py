"""Comparisons of all workers, which must have the same bits.

They begin only if all are at the same point: a worker that has gone back to
another backup than the others would train on in silence, or hang all of them.
Then they add up their gradients and go on alone. After a fault of memory or of
a processor one of them would train on with other weights, and nobody would
know.
"""

import contextlib
import itertools
import secrets
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
)
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import find_topology
from tfkfac.saving.entries import Spread
from tfkfac.shell.optimizer import SecondOrderOptimizer

# Numbers of the calls of `fit` in a job of several processes.
_fit_numbers = itertools.count()
# Batches between two comparisons: each takes a message, and to read all that is
# compared.
EVERY = 100
_LABELS_DIFFER = (
    "The labels of the first batch of a `PyDataset` differ between workers. "
    "Each worker takes its rows of every batch, so some rows may be missed and "
    "others come twice. If the `PyDataset` shuffles rows, call "
    "`keras.utils.set_random_seed` with the same seed on all workers before it "
    "is made."
)


@contextlib.contextmanager
def common_order(
    strategy: tf.distribute.Strategy, arguments: Mapping[str, Any]
) -> Iterator[list[keras.callbacks.Callback]]:
    """Compares the order of the data of a `fit`, as a context.

    All workers call it. Arrays are shuffled anew in each epoch and each `fit`
    where the seed is that of the strategy.

    Each worker takes its rows of each batch. If they shuffle differently, some
    rows are missed and others come twice. The seeds are compared, not the
    rows: nothing is taken from the data.

    The order of a `PyDataset` is in the user's code, which may also draw
    random changes of the inputs. So the labels of the first batch are
    compared, and a difference is a warning. (Keras' own shuffle of a
    `PyDataset` is of whole batches, which loses no rows.) A generator is not
    compared: workers may have generators of their own.

    Args:
        strategy: The strategy of the model.
        arguments: The arguments of `fit`.

    Yields:
        Callbacks for this `fit`.

    Raises:
        ValueError: On all workers, if their orders differ.
    """
    topology = find_topology(strategy)
    if topology.processes == 1:
        yield []
        return
    group = Communicator(topology.process, topology.processes, "data")
    seed, fit = _common_seed(strategy, group), next(_fit_numbers)
    shuffle = arguments.get("shuffle", True)
    orders = {
        "x": _order(arguments.get("x"), shuffle, group.rank),
        "validation_data": _order(
            arguments.get("validation_data"), False, group.rank
        ),
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
        by_worker = exchange({"checksums": checksums}, group)
        if find_differences(by_worker):
            warnings.warn(_LABELS_DIFFER, stacklevel=2)

    with contextlib.ExitStack() as stack:
        if seed is not None and seed == global_seed():
            seed_of_fit = zlib.crc32(f"{seed}, {fit}".encode())
            stack.enter_context(reshuffle_arrays(seed_of_fit))
        checksums = stack.enter_context(label_checksums())
        compare = keras.callbacks.LambdaCallback(on_train_begin=compare_labels)
        is_python = isinstance(arguments.get("x"), keras.utils.PyDataset)
        yield [compare] if is_python else []


def _common_seed(
    strategy: tf.distribute.Strategy, group: Communicator
) -> int | None:
    """Return the seed that the strategy has set on all workers, if any.

    `tfkfac.MultiWorkerMirroredStrategy` sets it in its constructor. Under
    TensorFlow's own strategy the first `fit` sets it, which is too late for a
    `tf.data.Dataset` that was made before, but not for arrays.
    """
    if not hasattr(strategy, "shuffle_seed"):
        proposal = {"seed": global_seed(), "random": secrets.randbits(31)}
        proposals = exchange(proposal, group)
        strategy.shuffle_seed = None
        if all(worker["seed"] is None for worker in proposals):
            strategy.shuffle_seed = int(proposals[0]["random"])
            tf.random.set_seed(strategy.shuffle_seed)
    seed: int | None = strategy.shuffle_seed
    return seed


def _order(data: Any, shuffle: Any, rank: int) -> list[Any]:
    """The seeds of the order of an argument of `fit`."""
    none = f"drawn by worker {rank}"
    data = getattr(data, "_original_dataset", data)  # distributed already
    if isinstance(data, keras.utils.PyDataset):
        return ["PyDataset"]
    if isinstance(data, tf.data.Dataset):
        seeds = shuffle_seeds(data)
        return [list(pair) if any(pair) else none for pair in seeds]
    leaves = keras.tree.flatten(data)
    if shuffle and leaves and all(hasattr(x, "shape") for x in leaves):
        seed = global_seed()
        return [none if seed is None else seed]
    return []


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
