"""State of several workers: saved by one, loaded by any number of workers.

Functions without the prefix `test_` run on every worker, or in this process.
"""

import dataclasses
import pathlib
import shutil
import signal
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import training
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.training import Training, build, distance
from tfkfac.callbacks import ChiefBackup
from tfkfac.shell import saving

slow = pytest.mark.slow
# Step 5 updates neither factors nor inverses.
STOP, END = 5, 9
HYBRID = {"distribution": "hybrid_opt", "gradient_worker_fraction": 0.5}
# Estimations begin before updates 3, 6 and 9: none is in flight at `STOP`.
ACCELERATED = {
    "accelerator_fraction": 0.5,
    "update_interval": 3,
    "lanczos_steps": 3,
}


def kfac(model: str = "cnn", inner: str = "sgd", **options: Any) -> Training:
    return Training("KFAC", model, inner, options=options)


def fosi(inner: str = "sgd", **options: Any) -> Training:
    return Training("FOSI", "small", inner, options=options)


# -------------------------------------------------------------- on a worker
def train(
    model: Any,
    case: Training,
    begin: int,
    end: int,
    *callbacks: Any,
    first_epoch: int | None = None,
    length: int = 1,
) -> None:
    """Train for steps of the feed, in epochs of a length."""
    training.fit(
        model,
        case,
        *callbacks,
        steps=slice(begin, end),
        epochs=end // length,
        initial_epoch=begin if first_epoch is None else first_epoch,
        steps_per_epoch=length,
    )


def everything(model: Any) -> dict[str, Array]:
    """Return the state of this process."""
    optimizer = model.optimizer
    variables = [*model.variables, *optimizer.variables]
    values = {
        f"variable {i} of replica {rank}": value
        for rank, replica in enumerate(copies(variables))
        for i, value in enumerate(replica)
    }
    for rank in local_ranks():
        for entry in optimizer.method.contents(rank).entries:
            value = np.array(entry.variable.numpy())
            values[f"{entry.key} of {rank}"] = value
    return values


def differences(got: dict[str, Array], want: dict[str, Array]) -> list[str]:
    assert list(got) == list(want)
    return [k for k in want if not np.array_equal(got[k], want[k])]


def is_accelerator(model: Any) -> bool:
    states = model.optimizer.method.states
    return hasattr(states[0], "subspace") and states[0].subspace is None


def assert_same_state(
    model: Any, got: dict[str, Array], want: dict[str, Array]
) -> None:
    """Compare bit for bit, but for an inner optimizer that is never used."""
    names = want.keys()
    if is_accelerator(model):
        count = len(model.variables)
        used = {f"variable {i} of replica 0" for i in range(count)}
        names = {k for k in names if ":" in k or k in used}
    assert not {*differences(got, want)} & {*names}


class Save(keras.callbacks.Callback):
    """Saves the weights after step `STOP` on the first worker."""

    save_freq = "epoch"

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == STOP:
            self.model.save_weights(self.path)


def savers(path: str | None) -> list[Any]:
    return [Save(path)] if path and 0 in local_ranks() else []


def resume(case: Training, path: str) -> None:
    """Save in a training, load, and train to the same end."""
    whole = build(case)
    train(whole, case, 0, END, *savers(path))
    resumed = build(case)
    resumed.load_weights(path)
    loaded = everything(resumed)
    train(resumed, case, STOP, END)
    got = everything(resumed)
    assert_same_state(resumed, got, everything(whole))
    assert len(differences(got, loaded)) >= 5


def restart(case: Training, path: str) -> None:
    """Save while the first estimation of MR-DHO2 is in flight, and load.

    The file is loaded into the same model after its last step, with another
    estimation in flight. The end is that of a training whose warm-up ends where
    the estimation starts again.
    """

    def with_warmup(steps: int) -> Training:
        options = {**case.options, "warmup_steps": steps}
        return dataclasses.replace(case, options=options)

    case = with_warmup(STOP - 1)
    model = build(case)
    train(model, case, 0, END, *savers(path))
    model.load_weights(path)
    train(model, case, STOP, END)
    later = build(with_warmup(STOP + 1))
    train(later, case, 0, END)
    assert_same_state(model, everything(model), everything(later))
    if not is_accelerator(model):
        assert int(model.optimizer.method.states[0].estimations) == 1


def finish(
    case: Training, source: str | None = None, target: str | None = None
) -> list[Array]:
    """Train from the start or from a file to the end; return the weights."""
    model = build(case)
    if source is not None:
        model.load_weights(source)
    train(model, case, STOP if source else 0, END, *savers(target))
    return model.get_weights()


def factors(
    case: Training, source: str | None = None, target: str | None = None
) -> dict[str, Any]:
    """Return the factors of this process, from a file or after some steps."""
    model = build(case)
    if source is not None:
        model.load_weights(source)
    else:
        train(model, case, 0, STOP, *savers(target))
    kept: dict[str, Any] = model.optimizer.factors()
    return kept


def backup(case: Training, directory: str) -> None:
    """Resume from a backup, also from a damaged one, and refuse mismatches."""
    killed = f"{directory}/killed"

    def copy_files(epoch: int, logs: Any) -> None:
        """Copy the files that are left if the job is killed here."""
        if (epoch, local_ranks()) == (STOP, [0]):
            shutil.copytree(directory, killed)

    copier = keras.callbacks.LambdaCallback(on_epoch_begin=copy_files)
    whole = build(case)
    train(whole, case, 0, END, ChiefBackup(directory), copier)
    kept = files_in(killed)
    assert kept == ["epoch-000004.weights.h5", f"epoch-{STOP:06}.weights.h5"]
    (rank,) = local_ranks()
    local = f"{directory} of worker {rank}"
    shutil.copytree(killed, local)
    if rank == 1:  # has a damaged copy of the newest file
        with open(f"{local}/{kept[-1]}", "r+b") as file:
            file.seek(2000)
            file.write(b"damaged")
    options = {**case.options, "damping": 0.3}
    other = build(dataclasses.replace(case, options=options))
    with pytest.raises(ValueError, match=r"damping: .* in the backup"):
        train(other, case, 0, END, ChiefBackup(killed))
    resumed, want = build(case), everything(whole)
    for folder, begin in (killed, STOP), (local, STOP - 1):
        callback = ChiefBackup(folder)
        train(resumed, case, begin, END, callback, first_epoch=0)
        assert not differences(everything(resumed), want)
    epochs, callbacks, plan, weights = refusals(case, resumed, directory)
    assert "epoch: 9 on worker 0, 10 on worker 1" in epochs
    assert "'ChiefBackup'" in callbacks
    assert "updates of the learning rate's decay:" in plan
    assert "digest of the weights:" in weights
    assert "epoch:" not in weights
    assert not files_in(directory) + files_in(killed)


def refusals(case: Training, model: Any, directory: str) -> list[str]:
    """Return errors for another epoch, callback, plan or weight on a worker."""
    (rank,) = local_ranks()
    errors = []

    def begin(epoch: int, *callbacks: Any) -> None:
        try:
            train(model, case, epoch, END + 2, *callbacks)
        except ValueError as error:
            errors.append(str(error))

    begin(END + rank)
    begin(END, *[ChiefBackup(directory)] * rank)

    def load_plan(logs: Any) -> None:
        """Restore, on worker 1 alone, a run with the same end."""
        if rank == 1:
            end = model.optimizer.num_updates + 2
            model.optimizer.plan.begin(0, end, END + 2)

    begin(END, keras.callbacks.LambdaCallback(on_train_begin=load_plan))
    variable = model.trainable_variables[0].value
    (local,) = strategy().experimental_local_results(variable)
    local.assign_add(tf.fill(local.shape, tf.cast(rank * 1e-12, local.dtype)))
    begin(END)
    return errors


class Terminate(keras.callbacks.Callback):
    """Sends SIGTERM to this process in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches == 5:
            signal.raise_signal(signal.SIGTERM)


def terminate(case: Training, directory: str) -> str:
    """Send SIGTERM to worker 1, and resume; return the newest file."""

    def run(epoch: int, *callbacks: Any) -> Any:
        """Train from an epoch of three steps to the end, or to SIGTERM."""
        model, code = build(case), None
        places = {"first_epoch": 0, "length": 3}
        try:
            train(model, case, 3 * epoch, END, *callbacks, **places)
        except SystemExit as end:
            code = end.code
        return model, code

    whole, _ = run(0)
    signals = [Terminate()] if local_ranks() == [1] else []
    stopped, code = run(0, ChiefBackup(directory), *signals)
    assert code == 128 + 15
    newest = files_in(directory)[-1]
    epoch, _, batch = newest.removesuffix(".weights.h5").partition("_")
    steps = 3 * int(epoch[-6:]) + int(batch.removeprefix("batch-"))
    assert steps in (5, 6)
    assert int(stopped.optimizer.iterations.numpy()) == steps
    resumed, _ = run(int(epoch[-6:]), ChiefBackup(directory))
    assert not differences(everything(resumed), everything(whole))
    return newest


def files_in(directory: str) -> list[str]:
    return sorted(p.name for p in pathlib.Path(directory).glob("*.h5"))


def keep_rate(case: Training, directory: str) -> None:
    """Resume with a rate that was set after the state was gathered."""
    model = build(case)

    def set_rate(epoch: int, logs: Any) -> None:
        model.optimizer.learning_rate = 0.25

    setter = keras.callbacks.LambdaCallback(on_epoch_end=set_rate)
    train(model, case, 0, 2, setter, ChiefBackup(directory, False))
    resumed = build(case)
    train(resumed, case, 2, 3, ChiefBackup(directory), first_epoch=0)
    assert float(resumed.optimizer.learning_rate) == 0.25


def save_without_gathering(directory: str) -> None:
    """All workers save: the file is complete. One worker saves: it warns."""
    saving.PATIENCE = 5
    (rank,) = local_ranks()
    case = kfac("small")
    model, loaded = build(case), build(case)
    train(model, case, 0, 1)
    with warnings.catch_warnings(record=True) as together:
        model.save_weights(f"{directory}/{rank}.weights.h5")
    assert not together
    model.optimizer.gather_state()  # the file is closed
    want = everything(model)
    loaded.load_weights(f"{directory}/0.weights.h5")
    assert not differences(everything(loaded), want)
    train(model, case, 1, 2)
    if rank == 0:
        with pytest.warns(UserWarning) as warned:
            model.save_weights(f"{directory}/alone.weights.h5")
            loaded.load_weights(f"{directory}/alone.weights.h5")
        messages = "\n".join(str(warning.message) for warning in warned)
        assert "optimizer.gather_state()" in messages
        assert "finds no curvature" in messages


def save_each(way: str, directory: str) -> None:
    """Load from Keras' backup of each worker, or from one checkpoint."""
    (rank,) = local_ranks()
    path = f"{directory}/worker {rank if way == 'backup' else 0}"
    case = kfac("small", distribution="mem_opt")
    whole = build(case)
    backup = keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
    callbacks = [backup] if way == "backup" else []
    train(whole, case, 0, STOP, *callbacks)
    if way == "checkpoint":
        whole.optimizer.gather_state()
        if rank == 0:
            checkpoint(whole).write(path)
        whole.optimizer.gather_state()
    train(whole, case, STOP, END)
    resumed = build(case)
    if way == "checkpoint":
        checkpoint(resumed).read(path).assert_existing_objects_matched()
    loaded = everything(resumed)
    first = 0 if callbacks else STOP
    train(resumed, case, STOP, END, *callbacks, first_epoch=first)
    got = everything(resumed)
    assert not differences(got, everything(whole))
    assert len(differences(got, loaded)) > 5


def checkpoint(model: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


# --------------------------------------------------------------------- tests
def test_backup(on_workers: Any, tmp_path: pathlib.Path) -> None:
    """A resumed training equals an uninterrupted one bit for bit."""
    # The default learning rate falls to 0 over the whole `fit`.
    case = dataclasses.replace(kfac("small", inner="default"), eager=True)
    on_workers("two", backup, case, str(tmp_path))


@slow
def test_backup_of_a_rate_that_is_set(
    on_workers: Any, tmp_path: pathlib.Path
) -> None:
    case = dataclasses.replace(kfac("small", inner="default"), eager=True)
    on_workers("two", keep_rate, case, str(tmp_path))


@slow
def test_one_worker_is_terminated(
    on_workers: Any, tmp_path: pathlib.Path
) -> None:
    """All workers stop after the same step, and resume bit for bit."""
    newest = on_workers("two", terminate, kfac("small"), str(tmp_path))
    assert len({*newest}) == 1


ACCUMULATED = {"inner": "adam", "gradient_accumulation_steps": 2}
RESUMED = {
    "two: dp_kfac": kfac("small", distribution="dp_kfac", **ACCUMULATED),
    "two: MR-DHO2": fosi(layout="columns", **ACCELERATED),
    "four: hybrid_opt": kfac(solver="eigen", **HYBRID),
    "four: DHO2": fosi("adam", layout="rows"),
    "mirrored: mem_opt": kfac(distribution="mem_opt"),
}


@slow
@pytest.mark.parametrize("name", RESUMED)
def test_resume(on_workers: Any, tmp_path: pathlib.Path, name: str) -> None:
    """A file of the first worker, between all updates of curvature."""
    path = str(tmp_path / "state.weights.h5")
    on_workers(name.partition(":")[0], resume, RESUMED[name], path)


@slow
def test_an_estimation_in_flight_starts_again(
    on_workers: Any, tmp_path: pathlib.Path
) -> None:
    """An estimation before update 5 is in flight at `STOP`."""
    lengths = {"update_interval": 2, "lanczos_steps": 4}
    options = {**ACCELERATED, **lengths, "final_update": "paper"}
    path = str(tmp_path / "state.weights.h5")
    on_workers("two", restart, fosi(layout="columns", **options), path)


@slow
def test_other_workers_and_modes(
    on_workers: Any, tmp_path: pathlib.Path
) -> None:
    """Files of two workers and of one process, up to rounding."""
    two, single = (str(tmp_path / f"{name}.weights.h5") for name in "ab")
    start = build(kfac()).get_weights()
    want = finish(kfac(), target=single)
    on_workers("two", finish, kfac(distribution="mem_opt"), target=two)
    after = on_workers("four", finish, kfac(**HYBRID), source=single)
    for weights in [finish(kfac(), source=two), *after]:
        assert distance(weights, want) <= 2e-7 * distance(want, start)


@slow
def test_factors_of_dp_kfac_move_to_their_new_owner(
    on_workers: Any, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "state.weights.h5")
    case = kfac(distribution="dp_kfac")
    workers = on_workers("two", factors, case, target=path)
    want = {name: value for kept in workers for name, value in kept.items()}
    workers = on_workers("four", factors, case, source=path)
    spread = {name: value for kept in workers for name, value in kept.items()}
    for got in spread, factors(kfac(), source=path):
        assert got.keys() == want.keys()
        for layer, named in want.items():
            for name, factor in named.items():
                np.testing.assert_array_equal(got[layer][name], factor)


@slow
def test_directions_in_another_layout(
    on_workers: Any, tmp_path: pathlib.Path
) -> None:
    """Rows of four workers become columns of two, or one process' state."""
    path = str(tmp_path / "state.weights.h5")
    want, *_ = on_workers("four", finish, fosi(layout="rows"), target=path)
    after = on_workers("two", finish, fosi(layout="columns"), source=path)
    size = distance(want, [0 * w for w in want])
    for weights in [*after, finish(fosi(), source=path)]:
        assert distance(weights, want) <= 1e-5 * size


@slow
def test_other_ways_of_saving(on_workers: Any, tmp_path: pathlib.Path) -> None:
    """Files without a callback, Keras' backups, and TensorFlow checkpoints."""
    on_workers("two", save_without_gathering, str(tmp_path))
    for way in "backup", "checkpoint":
        on_workers("two", save_each, way, str(tmp_path / way))
