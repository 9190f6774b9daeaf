"""State of an optimizer beside its variables, in files and checkpoints."""

import dataclasses
import io
import math
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.optimizers import raw_iterations
from tfkfac.distributed.agreement import exchange
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import Topology
from tfkfac.saving.entries import (
    STATE,
    Contents,
    Entry,
    Piece,
    join,
    ranks_to_join,
    storable,
)
from tfkfac.saving.store import (
    Saved,
    check_format,
    find_share,
    load_state,
    save_state,
    share_key,
    why_unreadable,
    write_format,
)
from tfkfac.shell.method import Method
from tfkfac.training.job import Job

# Seconds in which all workers must begin to save, if all do.
PATIENCE = 30


class SavedState(tf.train.experimental.PythonState):
    """The state of an optimizer's method, to be saved and loaded.

    In a job of several processes no worker has all of it. `gather` brings it
    together in the first one's memory, at a moment when all are there, so that
    saving needs no collective and that worker may do it alone. Where all save,
    that is such a moment.

    `tf.train.Checkpoint` saves it as a whole, in the form that files have: the
    variables of one worker are of no use to another. A SavedModel does not have
    it: it serves a model and cannot train it.
    """

    def __init__(self, name: str, method: Method) -> None:
        self._name = name
        self._method = method
        self._job: Job | None = None
        # When, and what of it the first process has.
        self._gathered: tuple[Any, dict[str, np.ndarray] | None] | None = None
        # Saves without a gathering, and whether this process alone has saved.
        self._meetings, self._is_alone = 0, False
        self._restored: bytes | None = None

    def create(self, job: Job) -> None:
        """Begins when there is state; loads what has been restored before."""
        self._job = job
        if self._restored is not None:
            restored, self._restored = self._restored, None
            with tf.init_scope():  # the first step may be being traced
                self.deserialize(restored)

    # -------------------------------------------------------------- saving
    def gather(self) -> None:
        """Brings the state together; see `SecondOrderOptimizer.gather_state`.

        All workers have to call it.
        """
        if self._job is None or self._job.topology.processes == 1:
            return
        state = gather_state(self._entries(), self._job)
        self._gathered = self._moment(self._job), state

    def _is_gathered(self, job: Job) -> bool:
        """True if the state is together; brings it so if all workers save."""
        moment = self._moment(job)
        if self._gathered is not None and self._gathered[0] == moment:
            return True
        if self._is_alone:  # who has waited in vain does so once
            return False
        group = job.among_processes("saving")
        steps = str(moment[0])  # others may count what only they own
        self._meetings += 1
        if not group.all_come(f"meeting {self._meetings}", steps, PATIENCE):
            self._is_alone = True
            return False
        self.gather()
        return True

    def save(self, store: MutableMapping[str, Any]) -> None:
        """Writes the state into a Keras store, or says why not."""
        job = self._job
        if job is None:
            return
        entries, replicas = self._entries(), job.topology.replicas
        if job.topology.processes == 1:
            save_state(store, entries, replicas)
        elif not self._is_gathered(job):
            warnings.warn(
                f"Optimizer '{self._name}' saves no curvature: each worker has "
                "a share of it, and it has not been gathered since the last "
                "step. Call `optimizer.gather_state()` on all workers before "
                "one of them saves, or let all save at once, each to a path of "
                f"its own: that is waited for once, {PATIENCE} seconds.",
                stacklevel=2,
            )
        elif self._gathered is not None and self._gathered[1] is not None:
            write_format(store)
            for key, value in self._gathered[1].items():
                store[key] = value
        else:
            save_state(store, entries, replicas)
            own = share_key(job.topology.process, job.topology.processes)
            store[own] = np.zeros(1, np.int64)

    def _entries(self) -> dict[int, list[Entry]]:
        """Entries to be saved now, by rank."""
        return {
            rank: contents.entries
            for rank, contents in self._contents().items()
        }

    def _contents(self) -> dict[int, Contents]:
        """Contents of each replica of this process, by rank."""
        job = self._job
        assert job is not None
        found = {}
        seeds = seed_states(job.find_model())
        # Named by the number, so that seeds of other layers do not fit.
        section = f"{len(seeds)} seed generators"
        for place, rank in enumerate(job.topology.local):
            own = self._method.contents(rank)
            own.entries.insert(
                0, Entry("", "skipped_steps", job.skipped[place])
            )
            if seeds:
                own = dataclasses.replace(
                    own, parts={**own.parts, section: lambda: None}
                )
            own.entries.extend(
                Entry(
                    "", f"state_{i}", seed[place], part=section, least=-math.inf
                )
                for i, seed in enumerate(seeds)
            )
            found[rank] = own
        return found

    def _moment(self, job: Job) -> list[int]:
        """Numbers that differ after each step, even after one skipped."""
        counts = [
            entry.variable
            for entry in next(iter(self._entries().values()))
            if entry.variable.dtype.is_integer and entry.shape == ()
        ]
        iterations = raw_iterations(job.inner_optimizer)
        return [int(count.numpy()) for count in (iterations, *counts)]

    # ------------------------------------------------------------- loading
    def load(self, store: Mapping[str, Any]) -> None:
        """Reads what `save` wrote, on any workers; says what it cannot use.

        Raises:
            ValueError: If it does not fit the model, or is in another format.
        """
        if not store.keys() and self._job is None:
            return  # a copy of one that has not begun
        if not store.keys():
            warnings.warn(
                f"Optimizer '{self._name}' finds no curvature in what is "
                "loaded, and keeps what it has.",
                stacklevel=2,
            )
            return
        why = self._why_not(store)
        if why is not None:
            warnings.warn(
                f"Optimizer '{self._name}' does not load its saved curvature: "
                f"{why}. It starts anew.",
                stacklevel=2,
            )
            return
        check_format(store, self._name)
        job, contents = self._job, self._contents()
        assert job is not None
        saved = Saved(store)
        own = {part for one in contents.values() for part in one.parts}
        used = {STATE, *(own & saved.parts)}
        wanted = {
            rank: [e for e in one.entries if e.part in used]
            for rank, one in contents.items()
        }
        layers = {e.layer for entries in wanted.values() for e in entries}
        layers.update(*(one.layers for one in contents.values()))
        saved.match(layers, used, self._name)
        load_state(saved, wanted, job.topology.replicas, self._name)
        for one in contents.values():
            for part, make_good in one.parts.items():
                if part not in used:
                    make_good()
        unused, missing = saved.parts - own, own - used
        if unused:
            anew = f"; {sorted(missing)} is made anew" if missing else ""
            warnings.warn(
                f"Optimizer '{self._name}' has no use for a part of its saved "
                f"state, {sorted(unused)}, and leaves it out{anew}.",
                stacklevel=2,
            )

    def _why_not(self, store: Mapping[str, Any]) -> str | None:
        """Reason why saved state is of no use here, or None."""
        why = why_unreadable(store)
        if why is not None:
            return why
        if self._job is None:
            return "the model is not built"
        share, here = find_share(store), self._job.topology
        if share not in (None, share_key(here.process, here.processes)):
            return (
                "the file has what one worker had and not all, and the job is "
                f"another ({share}); that of worker 0 has all"
            )
        return None

    # --------------------------------------------------------- checkpoints
    def serialize(self) -> bytes:
        """The state as `tf.train.Checkpoint` writes it."""
        store: dict[str, Any] = {}
        self.save(store)
        file = io.BytesIO()
        arrays: dict[str, Any] = {k: storable(v) for k, v in store.items()}
        np.savez(file, **arrays)
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Loads what `serialize` returned, as soon as there is state."""
        if self._job is None:
            self._restored = string_value
            return
        with np.load(io.BytesIO(string_value), allow_pickle=False) as store:
            self.load(store)


def seed_states(model: keras.Model | None) -> list[tuple[tf.Variable, ...]]:
    """State of each seed generator of a model, on each replica of a process.

    Keras' files do not have them: they are no weights of the model.
    """
    if model is None:
        return []
    strategy = model.distribute_strategy
    weights = {id(variable) for variable in model.weights}
    return [
        strategy.experimental_local_results(variable.value)
        for variable in model.variables
        if id(variable) not in weights
    ]


# ------------------------------------------------ the state of all workers
# What is on its way at one time, beside what has come.
_BYTES = 64 * 2**20
_CHIEF = 0
# A replica, and the name of an entry in a file.
Key = tuple[int, str]


def gather_state(
    entries: Mapping[int, Sequence[Entry]], job: Job
) -> dict[str, np.ndarray] | None:
    """Sends the first process what it needs of the others' state.

    Every process has to call it, with the entries of its replicas by rank.
    Each entry travels once, from a replica that has it, unless the first
    process has it itself. That returns all by their names in a file, in its
    main memory; the others None.
    """
    group = job.among_processes("state")
    variables = {
        (r, e.key): e.variable for r, es in entries.items() for e in es
    }
    pieces = exchange_pieces(entries, group)
    needed = ranks_to_join(pieces)
    keys = [(rank, key) for key, ranks in needed.items() for rank in ranks]
    values: dict[Key, np.ndarray] = {}
    with tf.init_scope(), tf.device("CPU:0"):
        for sender, batch in _batches(keys, pieces, job.topology):
            values |= _send(sender, batch, pieces, variables, group)
    if group.rank != _CHIEF:
        return None
    values |= {one: variables[one].numpy() for one in keys if one in variables}
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
    """Pieces of every replica of the job, by rank and name in a file."""
    own = {
        str(rank): [Piece.of(entry) for entry in of_rank]
        for rank, of_rank in entries.items()
    }
    found: dict[int, dict[str, Piece]] = {}
    for process in exchange(own, group):
        for rank, fields in process.items():
            pieces = [Piece.from_json(one) for one in fields]
            found[int(rank)] = {piece.key: piece for piece in pieces}
    return found


def _batches(
    keys: Sequence[Key],
    pieces: Mapping[int, Mapping[str, Piece]],
    topology: Topology,
) -> Iterator[tuple[int, list[Key]]]:
    """Batches of pieces that each process sends, the same on every process.

    Those of one dtype follow each other: they travel together.
    """
    for sender in range(_CHIEF + 1, topology.processes):
        own = [one for one in keys if topology.process_of(one[0]) == sender]
        own.sort(key=lambda one: (pieces[one[0]][one[1]].dtype, one))
        batch: list[Key] = []
        filled = 0
        for rank, key in own:
            piece = pieces[rank][key]
            size = int(np.prod(piece.shape)) * tf.as_dtype(piece.dtype).size
            if batch and filled + size > _BYTES:
                yield sender, batch
                batch, filled = [], 0
            batch.append((rank, key))
            filled += size
        if batch:
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
