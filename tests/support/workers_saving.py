"""What the tests of saved state run, alone and on every worker."""

import pathlib
import shutil
import signal
import warnings
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

import tfkfac
from tests.support import workers_fosi, workers_modes
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.worker_parts import FEEDS, images, shares
from tests.support.workers_modes import dataset
from tfkfac.callbacks import ChiefBackup
from tfkfac.shell import saving

# Step 5 is neither of factors nor of inverses.
STOP, END = 5, 9


def build(kind: str | None, optimizer: str, options: dict[str, Any]) -> Any:
    """A compiled model; `model` and `inner` may be among the options."""
    options = dict(options)
    family = {"kfac": workers_modes, "fosi": workers_fosi}[optimizer]
    model = options.pop("model", {"kfac": "cnn", "fosi": "mlp"}[optimizer])
    inner = options.pop("inner", "sgd")
    return family.compiled(kind, model, inner, options)


def train(
    kind: str | None,
    network: Any,
    begin: int,
    end: int,
    *callbacks: Any,
    first_epoch: int | None = None,
    length: int = 1,
) -> None:
    """The steps of the feed from one to another, in epochs of a length."""
    steps = shares(FEEDS["uneven"](), strategy(kind).num_replicas_in_sync)
    network.fit(
        dataset(kind, *images(), steps[begin:end], None),
        epochs=end // length,
        initial_epoch=begin if first_epoch is None else first_epoch,
        steps_per_epoch=length,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def everything(kind: str | None, network: Any) -> dict[str, Array]:
    """All that this process has."""
    optimizer = network.optimizer
    variables = [*network.variables, *optimizer.variables]
    found = {
        f"variable {i} of replica {rank}": value
        for rank, values in enumerate(copies(kind, variables))
        for i, value in enumerate(values)
    }
    for rank in local_ranks(kind):
        for entry in optimizer.method.contents(rank).entries:
            found[f"{entry.key} of {rank}"] = np.array(entry.variable.numpy())
    return found


def differences(got: dict[str, Array], want: dict[str, Array]) -> list[str]:
    assert list(got) == list(want)
    return [k for k in want if not np.array_equal(got[k], want[k])]


class Save(keras.callbacks.Callback):
    """Saves once."""

    save_freq = "epoch"

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == STOP:
            self.model.save_weights(self.path)


def savers(kind: str | None, path: str) -> list[Any]:
    """A callback on the first worker alone."""
    return [Save(path)] if 0 in local_ranks(kind) else []


def resume(
    kind: str | None, optimizer: str, path: str, **options: Any
) -> dict[str, list[str]]:
    """A run that is saved on its way, and one from there.

    Returns:
        What differs at the end, and what the steps in between change.
    """
    with floats("float64"):
        whole = build(kind, optimizer, options)
        train(kind, whole, 0, END, *savers(kind, path))
        again = build(kind, optimizer, options)
        again.load_weights(path)
        loaded = everything(kind, again)
        train(kind, again, STOP, END)
    want, got = everything(kind, whole), everything(kind, again)
    if isinstance(again.optimizer, tfkfac.FOSI) and not_training(again):
        want, got, loaded = (
            without_inner(again, x) for x in (want, got, loaded)
        )
    return {"end": differences(got, want), "changed": differences(got, loaded)}


def without_inner(network: Any, values: dict[str, Array]) -> dict[str, Array]:
    """Leave out the inner optimizer, whose state an accelerator never uses."""
    names = [
        f"variable {i} of replica 0" for i in range(len(network.variables))
    ]
    return {k: v for k, v in values.items() if ":" in k or k in names}


def restart(kind: str | None, path: str, **options: Any) -> dict[str, Any]:
    """Save an MR-DHO2 run while its first estimation is in flight, and load.

    The file is loaded into the same model, which has gone on to its last step
    and has another estimation in flight there.

    Returns:
        Differences to a run whose warm-up ends where the estimation starts
        again, the number of estimations, and the names in the file.
    """
    with floats("float64"):
        again = build(kind, "fosi", options | {"warmup_steps": STOP - 1})
        train(kind, again, 0, END, *savers(kind, path))
        again.load_weights(path)
        train(kind, again, STOP, END)
        later = build(kind, "fosi", options | {"warmup_steps": STOP + 1})
        train(kind, later, 0, END)
    want, got = everything(kind, later), everything(kind, again)
    if not_training(again):
        want, got = (without_inner(again, x) for x in (want, got))
    state = again.optimizer.method.states[0]
    with h5py.File(path, "r") as file:
        saved = sorted(k.split(":")[1] for k in file["optimizer/vars"])
    return {
        "end": differences(got, want),
        "estimations": None if not_training(again) else int(state.estimations),
        "saved": saved,
    }


def not_training(network: Any) -> bool:
    return network.optimizer.method.states[0].subspace is None


def part(
    kind: str | None,
    optimizer: str,
    begin: int,
    source: str | None,
    target: str | None,
    **options: Any,
) -> list[Array]:
    """Steps to the end, from what is in a file, saved on their way."""
    with floats("float64"):
        network = build(kind, optimizer, options)
        if source is not None:
            network.load_weights(source)
        callbacks = [] if target is None else savers(kind, target)
        train(kind, network, begin, END, *callbacks)
    return network.get_weights()


def backup(
    kind: str | None, optimizer: str, directory: str, **options: Any
) -> dict[str, Any]:
    """A run with backups, one that begins with the fifth, and refusals."""
    killed = f"{directory}/killed"

    def kill(epoch: int, logs: Any) -> None:
        """Leaves the files as a job that is killed then would."""
        if (epoch, local_ranks(kind)) == (STOP, [0]):
            shutil.copytree(directory, killed)

    callbacks: list[Any] = [
        ChiefBackup(directory),
        keras.callbacks.LambdaCallback(on_epoch_begin=kill),
    ]
    with floats("float64"):
        whole = build(kind, optimizer, options)
        train(kind, whole, 0, END, *callbacks)
        kept = files_in(killed)
        (rank,) = local_ranks(kind)
        local = f"{directory} of worker {rank}"  # a disk of each worker
        shutil.copytree(killed, local)
        if rank == 1:
            with open(f"{local}/{kept[-1]}", "r+b") as file:
                file.seek(2000)
                file.write(b"damaged")
        again = build(kind, optimizer, options)
        callback = ChiefBackup(killed)
        train(kind, again, STOP, END, callback, first_epoch=0)
        want, got = everything(kind, whole), everything(kind, again)
        callback = ChiefBackup(local)
        train(kind, again, STOP - 1, END, callback, first_epoch=0)
        before = everything(kind, again)
        return {
            "kept": kept,
            "end": differences(got, want),
            "end from the one before": differences(before, want),
            "said": refusals(kind, again, directory),
            "left": files_in(directory) + files_in(killed),
        }


def terminated(
    kind: str | None,
    optimizer: str,
    directory: str,
    worker: int,
    **options: Any,
) -> dict[str, Any]:
    """A run of which one worker gets SIGTERM, and one that goes on there."""
    asked = [Terminate()] if local_ranks(kind) == [worker] else []

    def run(epoch: int, *callbacks: Any) -> Any:
        """All the feed, from an epoch of three batches on."""
        network = build(kind, optimizer, options)
        places = {"first_epoch": 0, "length": 3}
        try:
            train(kind, network, 3 * epoch, END, *callbacks, **places)
        except SystemExit as end:
            found["code"] = end.code
            found["updates"] = int(network.optimizer.iterations.numpy())
        return network

    found: dict[str, Any] = {}
    with floats("float64"):
        whole = run(0)
        run(0, ChiefBackup(directory), *asked)
        found["newest"] = files_in(directory)[-1]
        epoch = int(found["newest"][len("epoch-") :][:6])
        again = run(epoch, ChiefBackup(directory))
    end = differences(everything(kind, again), everything(kind, whole))
    return found | {"end": end}


class Terminate(keras.callbacks.Callback):
    """Sends this process SIGTERM in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches == 5:
            signal.raise_signal(signal.SIGTERM)


def files_in(directory: str) -> list[str]:
    return sorted(p.name for p in pathlib.Path(directory).glob("*.h5"))


def refusals(kind: str | None, network: Any, directory: str) -> list[str]:
    """What is said where workers are not at the same point."""
    (rank,) = local_ranks(kind)
    found = []

    def begin(epoch: int, *callbacks: Any) -> None:
        try:
            train(kind, network, epoch, END + 2, *callbacks)
        except ValueError as error:
            found.append(str(error))

    begin(END + rank)
    begin(END, *[ChiefBackup(directory)] * rank)
    variable = network.trainable_variables[0].value
    (own,) = strategy(kind).experimental_local_results(variable)
    own.assign_add(tf.fill(own.shape, tf.cast(rank * 1e-12, own.dtype)))
    begin(END)
    return found


def factors(
    kind: str | None, target: str | None, source: str | None, **options: Any
) -> dict[str, Any]:
    """The factors that this process keeps, of a run or of a file."""
    with floats("float64"):
        network = build(kind, "kfac", options)
        if source is not None:
            network.load_weights(source)
        else:
            train(kind, network, 0, STOP, *savers(kind, target or ""))
    kept: dict[str, Any] = network.optimizer.factors()
    return kept


def ungathered(kind: str, directory: str) -> dict[str, Any]:
    """Saves without a gathering: by all workers at once, then by one alone.

    Returns:
        What the first leaves out, and what is said by both and when the second
        is loaded.
    """
    saving.PATIENCE = 5
    rank = local_ranks(kind)[0]
    with floats("float64"):
        network = build(kind, "kfac", {"model": "small"})
        train(kind, network, 0, 1)
        want = everything(kind, network)
        with warnings.catch_warnings(record=True) as together:
            network.save_weights(f"{directory}/{rank}.weights.h5")
        network.optimizer.gather_state()  # the file is closed
        again = build(kind, "kfac", {"model": "small"})
        again.load_weights(f"{directory}/0.weights.h5")
        found = differences(everything(kind, again), want)
        train(kind, network, 1, 2)
        with warnings.catch_warnings(record=True) as alone:
            if rank == 0:
                network.save_weights(f"{directory}/alone.weights.h5")
                again.load_weights(f"{directory}/alone.weights.h5")
    return {
        "found": found,
        "together": [str(one.message) for one in together],
        "alone": [str(one.message) for one in alone],
    }


def each_its_own(kind: str, how: str, directory: str) -> dict[str, list[str]]:
    """Every worker goes back to what it has saved, or all to one checkpoint.

    That is Keras' `BackupAndRestore` with a directory for each worker, or a
    checkpoint of `tf.train`.
    """
    rank = local_ranks(kind)[0]
    own = f"{directory}/worker {rank if how == 'backup' else 0}"
    options = {"model": "small", "distribution": "mem_opt"}
    with floats("float64"):
        whole = build(kind, "kfac", options)
        backup = keras.callbacks.BackupAndRestore(own, delete_checkpoint=False)
        saving = [backup] if how == "backup" else []
        train(kind, whole, 0, STOP, *saving)
        if how == "checkpoint":
            whole.optimizer.gather_state()
            if rank == 0:
                checkpoint(whole).write(own)
            whole.optimizer.gather_state()
        train(kind, whole, STOP, END)
        again = build(kind, "kfac", options)
        if how == "checkpoint":
            checkpoint(again).read(own).assert_existing_objects_matched()
        loaded = everything(kind, again)
        first = 0 if saving else STOP
        train(kind, again, STOP, END, *saving, first_epoch=first)
    want, got = everything(kind, whole), everything(kind, again)
    return {"end": differences(got, want), "changed": differences(got, loaded)}


def checkpoint(network: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=network, optimizer=network.optimizer)
