"""Saving and loading of a method's state, in files and checkpoints."""

import dataclasses
import io
import itertools
import math
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.optimizers import raw_iterations
from tfkfac.compat.overrides import Below, override
from tfkfac.distributed.agreement import exchange
from tfkfac.distributed.collectives import split_buckets
from tfkfac.saving.entries import (
    STATE,
    Contents,
    Entry,
    Piece,
    Region,
    join,
    ranks_to_join,
    storable,
)
from tfkfac.saving.store import (
    Saved,
    load_state,
    reason_to_ignore,
    save_state,
    worker_key,
    write_format,
)
from tfkfac.shell.method import Method
from tfkfac.training.fit_decay import RunPlan
from tfkfac.training.job import Job

# Section of the inner and the rest optimizer. Model files lack this section:
# Keras itself saves the variables of these optimizers there.
WRAPPED_SECTION = "wrapped optimizers"
# Seconds to wait until all workers save.
PATIENCE = 30
# What to do instead of copying `variables`.
HOW_TO_COPY = (
    "To copy the state of an optimizer call `save_own_variables(store)` with a "
    "dict, and `load_own_variables(store)` of the copy; of a "
    "`LossScaleOptimizer` those of its `inner_optimizer`. To start again "
    "create a new optimizer."
)


class SavedState(tf.train.experimental.PythonState):
    """Save and load the state of an optimizer's method.

    In a job of several processes, the state is distributed. `gather` collects
    it in the memory of worker 0; this worker can then save alone, without
    collectives. If all workers save at once, saving gathers the state.

    `tf.train.Checkpoint` saves the gathered state as one value, because the
    variables of one worker have no meaning on another.
    """

    def __init__(self, name: str, method: Method, plan: RunPlan) -> None:
        self._name = name
        self._method = method
        self._plan = plan
        self._job: Job | None = None
        # `_fingerprint` of the gathered state; the state, only on process 0.
        self._gathered: tuple[Any, dict[str, np.ndarray] | None] | None = None
        # Attempts to save on all workers at once; True after a failed attempt.
        self._num_attempts, self._saves_alone = 0, False
        self._restored: bytes | None = None
        # True if the count of iterations was assigned outside of a step, and
        # if it may be: Keras loads the wrapped optimizers after the curvature.
        self._is_assigned, self._is_loading = False, False

    def create(self, job: Job) -> None:
        """Bind to a built job; load a checkpoint that was restored earlier."""
        self._job = job

        def assign(below: Below, *args: Any, **kwargs: Any) -> Any:
            self._is_assigned = not self._is_loading
            return below(*args, **kwargs)

        override(self._iterations(job), "assign", assign)
        if self._restored is not None:
            restored, self._restored = self._restored, None
            with tf.init_scope():  # the first step may be traced now
                self.deserialize(restored)

    # -------------------------------------------------------------- saving
    def gather(self) -> None:
        """Gather the state; all workers must call this."""
        if self._job is None or self._job.topology.processes == 1:
            return
        state = gather_state(self._entries(), self._job)
        self._gathered = self._fingerprint(self._job), state

    def save(self, store: MutableMapping[str, Any]) -> None:
        """Write the state into a Keras store, or warn that it is incomplete."""
        job = self._job
        if job is None:
            return
        entries, replicas = self._entries(), job.topology.replicas
        if job.topology.processes == 1:
            save_state(store, entries, replicas)
            return
        fingerprint = self._fingerprint(job)
        is_gathered = self._gathered and self._gathered[0] == fingerprint
        if not is_gathered and not self._saves_alone:
            # Gather now if all workers save. Compare only the iterations: other
            # counters may differ by worker.
            self._num_attempts += 1
            is_gathered = job.among_processes("saving").all_come(
                f"attempt {self._num_attempts}", str(fingerprint[0]), PATIENCE
            )
            if is_gathered:
                self.gather()
            else:
                self._saves_alone = True  # do not wait again
        if not is_gathered:
            warnings.warn(
                f"Optimizer '{self._name}' saves no curvature: each worker has "
                "a part of it, and it has not been gathered since the last "
                "step. Call `optimizer.gather_state()` on all workers before "
                "one of them saves, or save on all workers at once, to "
                f"different paths, within {PATIENCE} seconds.",
                stacklevel=2,
            )
        elif self._gathered is not None and self._gathered[1] is not None:
            write_format(store)
            # A callback may have set a learning rate after the state was
            # gathered. The plan is equal on all workers.
            plan = {
                entry.key: storable(np.asarray(entry.variable.numpy()))
                for entry in self._plan.entries()
            }
            for key, value in (self._gathered[1] | plan).items():
                store[key] = value
        else:
            save_state(store, entries, replicas)
            key = worker_key(job.topology.process, job.topology.processes)
            store[key] = np.zeros(1, np.int64)

    def check_iterations(self) -> None:
        """Raise an error if the count of iterations was assigned."""
        self._is_loading = False
        if self._is_assigned and self._job is not None:
            raise ValueError(
                f"Variable '{self._iterations(self._job).path}' of optimizer "
                f"'{self._name}' was assigned outside of a step. `variables` "
                "and Keras' state trees do not contain the curvature. "
                f"{HOW_TO_COPY}"
            )

    @staticmethod
    def _iterations(job: Job) -> keras.Variable:
        """Return the last count of iterations in `variables`.

        The count of an inner optimizer beside a rest optimizer may be assigned:
        it is the clock of schedules.
        """
        return raw_iterations(job.rest_optimizer or job.inner_optimizer)

    def save_wrapped(self, store: MutableMapping[str, Any]) -> None:
        """Write the variables of the inner and the rest optimizer."""
        if self._job is not None:
            for entry in wrapped_entries(self._job):
                store[entry.key] = storable(np.asarray(entry.variable.numpy()))

    def _entries(self) -> dict[int, list[Entry]]:
        """Return the entries to save of each local replica, by rank."""
        contents = self._contents()
        return {rank: contents[rank].entries for rank in contents}

    def _contents(self) -> dict[int, Contents]:
        """Return the state to save of each local replica, by rank."""
        job = self._job
        assert job is not None
        result = {}
        # The states of seed generators, which are no weights: Keras' files do
        # not contain them.
        seeds: list[tuple[tf.Variable, ...]] = []
        if (model := job.find_model()) is not None:
            strategy = model.distribute_strategy
            weights = {id(variable) for variable in model.weights}
            seeds = [
                strategy.experimental_local_results(variable.value)
                for variable in model.variables
                if id(variable) not in weights
            ]
        # The number in the name makes `load` reject another number of seeds.
        section = f"{len(seeds)} seed generators"
        for index, rank in enumerate(job.topology.local):
            contents = self._method.contents(rank)
            entries = [
                Entry("", "skipped_steps", job.skipped[index]),
                *self._plan.entries(),
                *contents.entries,
            ]
            resets = dict(contents.optional_sections)
            for i, seed in enumerate(seeds):
                name, state = f"state_{i}", seed[index]
                entries.append(
                    Entry("", name, state, section=section, least=-math.inf)
                )
                resets[section] = lambda: None
            result[rank] = dataclasses.replace(
                contents, entries=entries, optional_sections=resets
            )
        return result

    def _fingerprint(self, job: Job) -> list[int]:
        """Return counts that change in every step, even in a skipped step."""
        plan = {entry.key for entry in self._plan.entries()}
        counts = [
            entry.variable
            for entry in next(iter(self._entries().values()))
            if entry.variable.dtype.is_integer
            and entry.shape == ()
            and entry.key not in plan
        ]
        iterations = raw_iterations(job.inner_optimizer)
        return [int(count.numpy()) for count in (iterations, *counts)]

    # ------------------------------------------------------------- loading
    def load(self, store: Mapping[str, Any]) -> None:
        """Load state that `save` wrote on any number of workers.

        Unusable state causes a warning; state that does not fit, a ValueError.
        """
        if not store.keys() and self._job is None:
            return  # a copy of an optimizer that was not built
        self._is_assigned, self._is_loading = False, True
        self._gathered = None  # older than the loaded state
        if not store.keys():
            warnings.warn(
                f"Optimizer '{self._name}' finds no curvature in the loaded "
                "file and keeps its current state.",
                stacklevel=2,
            )
            return
        key = None
        if self._job is not None:
            topology = self._job.topology
            key = worker_key(topology.process, topology.processes)
        reason = reason_to_ignore(store, self._name, key)
        if reason is not None:
            warnings.warn(
                f"Optimizer '{self._name}' does not load its saved curvature: "
                f"{reason}. The curvature starts from its initial state.",
                stacklevel=2,
            )
            return
        job, contents = self._job, self._contents()
        assert job is not None
        saved = Saved(store)
        sections = {
            name for c in contents.values() for name in c.optional_sections
        }
        used = {STATE, *(sections & saved.sections)}
        entries = {
            rank: [e for e in c.entries if e.section in used]
            for rank, c in contents.items()
        }
        wrapped = wrapped_entries(job)
        if saved.names(WRAPPED_SECTION) == {e.name for e in wrapped}:
            sections.add(WRAPPED_SECTION)
            used.add(WRAPPED_SECTION)
            next(iter(entries.values())).extend(wrapped)
        layers = {e.layer for of_rank in entries.values() for e in of_rank}
        layers.update(*(c.layers for c in contents.values()))
        saved.match(layers, used, self._name)
        load_state(saved, entries, job.topology.replicas, self._name)
        for c in contents.values():
            for name, reset in c.optional_sections.items():
                if name not in used:
                    reset()
        unused, missing = saved.sections - sections, sections - used
        if unused:
            reset_text = f"; {sorted(missing)} is reset" if missing else ""
            warnings.warn(
                f"Optimizer '{self._name}' does not use a section of its saved "
                f"state, {sorted(unused)}{reset_text}.",
                stacklevel=2,
            )

    # --------------------------------------------------------- checkpoints
    def serialize(self) -> bytes:
        """Return the state as bytes, for `tf.train.Checkpoint`."""
        store: dict[str, Any] = {}
        self.save(store)
        file = io.BytesIO()
        arrays: dict[str, Any] = {k: storable(v) for k, v in store.items()}
        np.savez(file, **arrays)
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Load the result of `serialize`, at once or in `create`."""
        if self._job is None:
            self._restored = string_value
            return
        with np.load(io.BytesIO(string_value), allow_pickle=False) as store:
            self.load(store)


def wrapped_entries(job: Job) -> list[Entry]:
    """Return entries of the variables of the inner and the rest optimizer."""
    optimizers = {"inner": job.inner_optimizer, "rest": job.rest_optimizer}
    return [
        Entry(
            "",
            f"{role} {type(optimizer).__name__} {i}",
            v.value,
            section=WRAPPED_SECTION,
        )
        for role, optimizer in optimizers.items()
        if optimizer is not None
        for i, v in enumerate(optimizer.variables)
    ]


# ------------------------------------------------ the state of all workers
_CHIEF = 0


def gather_state(
    entries: Mapping[int, Sequence[Entry]], job: Job
) -> dict[str, np.ndarray] | None:
    """Send the state to the first process; every process must call this.

    Each entry is sent once, by one replica, unless the first process has it.
    On the first process, returns the whole state in host memory, by names in a
    file; on other processes, None.
    """
    group = job.among_processes("state")
    variables = {
        (r, e.key): e.variable for r, es in entries.items() for e in es
    }
    # Gather the `Piece`s of all replicas, by rank and name in a file.
    local = {
        str(rank): [Piece.from_entry(entry) for entry in of_rank]
        for rank, of_rank in entries.items()
    }
    pieces: dict[int, dict[str, Piece]] = {}
    for process in exchange(local, group):
        for rank, fields in process.items():
            restored = pieces.setdefault(int(rank), {})
            for key, shape, dtype, stacked, region in fields:
                # Tuples are lists after a round trip through JSON.
                region = region and Region(*map(tuple, region))
                restored[key] = Piece(key, tuple(shape), dtype, stacked, region)
    needed = ranks_to_join(pieces)
    keys = [(rank, key) for key, ranks in needed.items() for rank in ranks]
    values: dict[tuple[int, str], np.ndarray] = {}
    with tf.init_scope(), tf.device("CPU:0"):
        for sender in range(_CHIEF + 1, job.topology.processes):
            sent = [k for k in keys if job.topology.process_of(k[0]) == sender]
            # Sort by dtype: one message holds tensors of one dtype.
            sent.sort(key=lambda key: (pieces[key[0]][key[1]].dtype, key))
            specs = [
                tf.TensorSpec(pieces[rank][key].shape, pieces[rank][key].dtype)
                for rank, key in sent
            ]
            remaining = iter(sent)
            # One message at a time bounds the memory for its copies.
            for bucket in split_buckets(specs):
                message = list(itertools.islice(remaining, len(bucket)))
                tensors = None
                if group.rank == sender:
                    tensors = [
                        tf.constant(variables[key].numpy(), spec.dtype)
                        for key, spec in zip(message, bucket, strict=True)
                    ]
                members = _CHIEF, sender
                received = group.broadcast(tensors, bucket, sender, members)
                if group.rank == _CHIEF and received is not None:
                    arrays = [tensor.numpy() for tensor in received]
                    values.update(zip(message, arrays, strict=True))
    if group.rank != _CHIEF:
        return None
    values |= {key: variables[key].numpy() for key in keys if key in variables}
    return {
        key: join(
            key,
            pieces,
            {rank: np.asarray(values.pop((rank, key))) for rank in ranks},
            job.topology.replicas,
        )
        for key, ranks in needed.items()
    }
