"""The state of all workers, brought together in the first one's memory."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfkfac.distributed.agreement import exchange
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import Topology
from tfkfac.saving.entries import Entry, Piece
from tfkfac.saving.join import join, plan
from tfkfac.training.job import Job

# What is on its way at one time, beside what has come.
_BYTES = 64 * 2**20
_CHIEF = 0
# A replica, and the name of an entry in a file.
Key = tuple[int, str]


def gather_state(
    entries: Mapping[int, Sequence[Entry]], job: Job
) -> dict[str, np.ndarray] | None:
    """Sends the first process what it needs of the others' state.

    Every process has to call it. Each entry travels once, from a replica that
    has it, unless the first process has it itself.

    Args:
        entries: What each replica of this process has, by rank.
        job: The job, of several processes.

    Returns:
        In the first process, all entries by their names in a file, in its main
        memory; None in the others.
    """
    group = job.among_processes("state")
    variables = {
        (r, e.key): e.variable for r, es in entries.items() for e in es
    }
    pieces = exchange_pieces(entries, group)
    needed = plan(pieces)
    values: dict[Key, np.ndarray] = {}
    with tf.init_scope(), tf.device("CPU:0"):
        for sender, keys in _batches(needed, pieces, job.topology):
            values |= _send(sender, keys, pieces, variables, group)
    if group.rank != _CHIEF:
        return None
    own = job.topology.local
    for key, ranks in needed.items():
        for rank in set(ranks) & set(own):
            values[rank, key] = variables[rank, key].numpy()
    return {
        key: join(
            key,
            pieces,
            {rank: np.asarray(values.pop((rank, key))) for rank in ranks},
            job.topology.replicas,
        )
        for key, ranks in needed.items()
    }


def exchange_pieces(
    entries: Mapping[int, Sequence[Entry]], group: Communicator
) -> dict[int, dict[str, Piece]]:
    """What every replica of the job has, by rank and name in a file."""
    own = {
        str(rank): [Piece.of(entry).to_json() for entry in of_rank]
        for rank, of_rank in entries.items()
    }
    found: dict[int, dict[str, Piece]] = {}
    for process in exchange(own, group):
        for rank, fields in process.items():
            pieces = [Piece.from_json(one) for one in fields]
            found[int(rank)] = {piece.key: piece for piece in pieces}
    return found


def _batches(
    needed: Mapping[str, Sequence[int]],
    pieces: Mapping[int, Mapping[str, Piece]],
    topology: Topology,
) -> Iterator[tuple[int, list[Key]]]:
    """What each process sends at a time, the same on every process.

    Those of one dtype follow each other: they travel together.
    """
    by_sender: dict[int, list[Key]] = {}
    for key, ranks in needed.items():
        for rank in ranks:
            sender = topology.process_of(rank)
            if sender != _CHIEF:
                by_sender.setdefault(sender, []).append((rank, key))
    for sender, keys in sorted(by_sender.items()):
        keys.sort(key=lambda k: (pieces[k[0]][k[1]].dtype, k))
        batch: list[Key] = []
        filled = 0
        for rank, key in keys:
            piece = pieces[rank][key]
            size = int(np.prod(piece.shape)) * tf.as_dtype(piece.dtype).size
            if batch and filled + size > _BYTES:
                yield sender, batch
                batch, filled = [], 0
            batch.append((rank, key))
            filled += size
        yield sender, batch


def _send(
    sender: int,
    keys: Sequence[Key],
    pieces: Mapping[int, Mapping[str, Piece]],
    variables: Mapping[Key, tf.Variable],
    group: Communicator,
) -> dict[Key, np.ndarray]:
    """Sends some pieces to the first process; there, returns them."""
    like = [
        tf.TensorSpec(pieces[rank][key].shape, pieces[rank][key].dtype)
        for rank, key in keys
    ]
    mine = None
    if group.rank == sender:
        mine = [
            tf.constant(variables[one].numpy(), spec.dtype)
            for one, spec in zip(keys, like, strict=True)
        ]
    received = group.broadcast(mine, like, sender, (_CHIEF, sender))
    if received is None or group.rank != _CHIEF:
        return {}
    arrays = [tensor.numpy() for tensor in received]
    return dict(zip(keys, arrays, strict=True))
