"""Backups of one process: complete, exact, with a warning on failure."""

import hashlib
import os
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import keras
import pytest
from keras import layers

import tfkfac
from tests.support.small import (
    CLASSES,
    assert_same,
    data,
    everything,
    loss,
)
from tests.support.summaries import sequential
from tfkfac.callbacks import ChiefBackup


class StopBefore(keras.callbacks.Callback):
    """Record the first epoch; interrupt the training before an epoch."""

    def __init__(self, epoch: int | None = None) -> None:
        super().__init__()
        self.epoch = epoch
        self.first: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.first = epoch if self.first is None else self.first
        if self.epoch in (None, epoch):
            raise KeyboardInterrupt


def network(optimizer: Any = None) -> Any:
    """Create a model with dropout, whose seed generator is a state."""
    keras.utils.set_random_seed(0)
    model = sequential(
        layers.Dense(5, activation="tanh", name="hidden"),
        layers.Dropout(0.5, seed=1),
        layers.Dense(CLASSES),
    )
    intervals = {"factor_update_interval": 3, "inverse_update_interval": 5}
    adam = keras.optimizers.Adam(1e-2)
    model.compile(
        optimizer or tfkfac.KFAC(adam, only_layers="hidden", **intervals),
        loss(),
        run_eagerly=True,
    )
    return model


def fit(model: Any, epochs: int, *callbacks: Any, begin: int = 0) -> Any:
    return model.fit(
        *data(12),
        4,
        epochs,
        0,
        [*callbacks],
        shuffle=False,
        initial_epoch=begin,
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def whole() -> dict[int, Any]:
    """Return the states of a training without backups, by its epochs."""
    model, states = network(), {}
    for epoch in (1, 2, 3):
        fit(model, epoch, begin=epoch - 1)
        states[epoch] = everything(model)
    return states


NEWEST, BEFORE = "epoch-000002.weights.h5", "epoch-000001.weights.h5"
MARK = b"\ntfkfac sha256 "


@pytest.fixture(scope="module")
def two_backups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("backups")
    with pytest.raises(KeyboardInterrupt):
        fit(network(), 3, ChiefBackup(directory), StopBefore(2))
    return directory


@pytest.fixture
def copied(two_backups: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_backups, tmp_path / "backups"))


@pytest.fixture(scope="module")
def trained() -> Any:
    return network()


def test_a_resumed_run_equals_an_uninterrupted_run(
    whole: dict[int, Any], copied: Path, capsys: Any
) -> None:
    """Bit for bit, with curvature, slots and random layers."""
    assert names(copied) == [BEFORE, NEWEST]
    again = network()
    history = fit(again, 3, ChiefBackup(copied, delete_checkpoint=False))
    assert history.epoch == [2]
    assert names(copied) == [NEWEST, "epoch-000003.weights.h5"]
    line = f"tfkfac: resumed from '{copied / NEWEST}' after epoch 2\n"
    assert capsys.readouterr().err.count(line) == 1
    assert_same(everything(again), whole[3])
    # Another `fit` of the same model begins at its `initial_epoch`.
    assert fit(again, 1).epoch == [0]
    assert fit(again, 4, ChiefBackup(copied)).epoch == [3]
    assert names(copied) == []


# ------------------------------------------------------- damaged backups
def first_epoch(model: Any, directory: Path) -> int | None:
    stop = StopBefore()
    with pytest.raises(KeyboardInterrupt):
        fit(model, 3, ChiefBackup(directory), stop)
    return stop.first


def content(path: Path) -> bytes:
    """Return the bytes of a backup without the checksum."""
    content, mark, digest = path.read_bytes().rpartition(MARK)
    assert mark and digest == hashlib.sha256(content).hexdigest().encode()
    return content


def flipped(path: Path, place: float) -> None:
    """Invert the byte at a relative position in the file."""
    data = bytearray(path.read_bytes())
    data[round(place * (len(data) - 1))] ^= 255
    path.write_bytes(data)


def with_position(path: Path, **position: Any) -> None:
    """Write another epoch or batch, with a valid checksum."""
    path.write_bytes(content(path))
    with h5py.File(path, "a") as file:
        file["chief_backup"].attrs.update(position)
    digest = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    path.write_bytes(path.read_bytes() + MARK + digest)


def directory_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Any] = {
    "middle": lambda path: flipped(path, 0.5),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "no checksum": lambda path: path.write_bytes(content(path)),
    "empty": lambda path: path.write_bytes(b""),
    "directory": directory_in_its_place,
    "no epoch": lambda path: with_position(path, epoch="none"),
    "negative batch": lambda path: with_position(path, batch=-1),
}
if os.geteuid():  # the superuser may read any file
    DAMAGES["no permission"] = lambda path: path.chmod(0)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_backup(
    damage: str, copied: Path, trained: Any, capsys: Any
) -> None:
    """Its name is printed, and the backup before it is loaded."""
    DAMAGES[damage](copied / NEWEST)
    assert first_epoch(trained, copied) == 1
    errors = capsys.readouterr().err
    assert f"'{copied / NEWEST}'" in errors and errors.count(BEFORE) == 1
    assert f"resumed from '{copied / BEFORE}'" in errors
    # With both backups damaged:
    DAMAGES["middle"](copied / BEFORE)
    with pytest.raises(ValueError, match="backup that is whole") as error:
        fit(trained, 3, ChiefBackup(copied))
    assert NEWEST in str(error.value) and BEFORE in str(error.value)


def test_backups_that_do_not_fit(copied: Path, trained: Any) -> None:
    """Raises an error; does not load an earlier backup or delete a file."""
    with_position(copied / NEWEST, format=3)
    words = f"{NEWEST}' was written by format 3, .* reads format 2"
    with pytest.raises(ValueError, match=words):
        fit(trained, 3, ChiefBackup(copied))
    assert names(copied) == [BEFORE, NEWEST]
    # A batch that the data does not have.
    with_position(copied / BEFORE, batch=7)
    name = "epoch-000001_batch-000000007.weights.h5"
    (copied / BEFORE).rename(copied / name)
    (copied / NEWEST).unlink()
    with pytest.raises(ValueError, match=r"batch 7 of epoch 2.* only 3"):
        fit(trained, 3, ChiefBackup(copied))


def test_training_resumes_from_the_backup_before(
    whole: dict[int, Any], copied: Path, trained: Any
) -> None:
    """Bit for bit; damaged and incomplete backups are deleted."""
    middle = copied / "epoch-000001_batch-000000002.weights.h5"
    (copied / NEWEST).rename(middle)
    flipped(middle, 0.5)
    (copied / ".writing-epoch-000003.weights.h5").touch()
    (copied / "epoch-best.weights.h5").touch()  # of another program
    with pytest.raises(KeyboardInterrupt):
        fit(trained, 3, ChiefBackup(copied), StopBefore(2))
    assert names(copied) == [BEFORE, NEWEST, "epoch-best.weights.h5"]
    assert fit(trained, 3, ChiefBackup(copied)).epoch == [2]
    assert names(copied) == ["epoch-best.weights.h5"]
    assert_same(everything(trained), whole[3])


def test_a_directory_is_not_deleted(copied: Path, trained: Any) -> None:
    directory_in_its_place(copied / NEWEST)
    with pytest.warns(UserWarning, match=f"{NEWEST}' cannot be deleted"):
        assert fit(trained, 2, ChiefBackup(copied)).epoch == [1]
    assert names(copied) == [NEWEST]


def test_a_finished_job(copied: Path, trained: Any) -> None:
    """A resumed `fit` without an epoch left does not shorten the next one.

    Files of `ModelCheckpoint` in the same directory stay.
    """
    (copied / "epoch-02.weights.h5").touch()
    assert fit(trained, 2, ChiefBackup(copied)).epoch == []
    assert names(copied) == ["epoch-02.weights.h5"]
    assert fit(trained, 1).epoch == [0]


def test_a_full_disk(copied: Path, trained: Any) -> None:
    """The last backup stays, with a warning, and training continues.

    A file size limit of the operating system simulates the full disk.
    """
    (copied / NEWEST).unlink()
    before = (copied / BEFORE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.warns(UserWarning, match="Epoch 2 cannot be backed"):
            fit(trained, 2, ChiefBackup(copied, delete_checkpoint=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(copied) == [BEFORE]
    assert (copied / BEFORE).read_bytes() == before


def test_unsuitable_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with an optimizer of tfkfac"):
        fit(network("sgd"), 1, ChiefBackup(tmp_path))
    unbuilt = keras.Sequential([layers.Dense(CLASSES)])
    unbuilt.compile(tfkfac.KFAC(), loss())
    with pytest.raises(ValueError, match="with a built model"):
        fit(unbuilt, 1, ChiefBackup(tmp_path))
    with pytest.raises(ValueError, match="not a URL"):
        ChiefBackup("gs://bucket/run")


def job(optimizer: Any = None, units: int = 5, **compiled: Any) -> Any:
    """A model with layers and an optimizer of Keras' default names."""
    twice = layers.Lambda(lambda x: 2 * x)
    hidden = sequential(layers.Dense(units, activation="tanh"))
    model = sequential(hidden, twice, layers.Dense(CLASSES))
    optimizer = optimizer or tfkfac.KFAC(sgd())
    model.compile(optimizer, loss(), run_eagerly=True, **compiled)
    return model


def sgd(rate: Any = 0.1, **options: Any) -> Any:
    return keras.optimizers.SGD(rate, **options)


def decay(steps: int) -> Any:
    return keras.optimizers.schedules.PolynomialDecay(0.1, steps)


def scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer)


def interrupted(model: Any, directory: Path) -> Path:
    """Return the directory of a job that ends after one epoch of two."""
    with pytest.raises(KeyboardInterrupt):
        fit(model, 2, ChiefBackup(directory), StopBefore(1))
    return directory


@pytest.fixture(scope="module")
def backup_of_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(job(), tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: job(tfkfac.KFAC(sgd(), damping=0.3)),
         "argument damping: 0.01 in the backup, 0.3 here"),
        (lambda: job(tfkfac.FOSI(sgd())),
         "optimizer: 'KFAC' in the backup, 'FOSI' here"),
        (lambda: job(units=6),
         "shapes of the weights: .*'dense', units: 5 in the backup, 6 here"),
    ],
)  # fmt: skip
def test_a_backup_of_another_job_is_refused(
    other: Any, difference: str, backup_of_job: Path
) -> None:
    """The file stays as it is."""
    (file,) = backup_of_job.iterdir()
    before = file.read_bytes()
    match = f"{file}' is of another model or optimizer: .*{difference}"
    with pytest.raises(ValueError, match=match):
        fit(other(), 2, ChiefBackup(backup_of_job))
    assert [*backup_of_job.iterdir()] == [file] and file.read_bytes() == before


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (None, lambda: job(tfkfac.KFAC(sgd(0.01), name="second", solver="eigen",
                                       distribution="mem_opt"),
                           metrics=["accuracy"])),
        (lambda: job(tfkfac.KFAC(sgd(decay(9)), damping=decay(9))),
         lambda: job(tfkfac.KFAC(sgd(decay(12)), damping=decay(12)))),
        (lambda: job(scaled(tfkfac.KFAC(sgd()))),
         lambda: job(scaled(tfkfac.KFAC(sgd())))),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Optimizer 'kfac' does not use a section")
def test_a_backup_of_the_same_job(
    first: Any, other: Any, backup_of_job: Path, tmp_path: Path
) -> None:
    """Names, rates, lengths of schedules, solver and mode may differ."""
    if first is None:
        shutil.copytree(backup_of_job, tmp_path, dirs_exist_ok=True)
    else:
        interrupted(first(), tmp_path)
    assert fit(other(), 2, ChiefBackup(tmp_path)).epoch == [1]


class Terminate(keras.callbacks.Callback):
    """Send SIGTERM to this process in the last epoch, or at its end."""

    def __init__(self, batch: int | None) -> None:
        super().__init__()
        self.batch = batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.is_last = epoch + 1 == self.params["epochs"]

    def on_train_batch_begin(self, batch: int | None, logs: Any = None) -> None:
        if self.is_last and batch == self.batch:
            signal.raise_signal(signal.SIGTERM)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_train_batch_begin(None)


def test_sigterm_backs_up_and_exits(
    whole: dict[int, Any], tmp_path: Path, capsys: Any
) -> None:
    """In the middle of an epoch; the next run resumes there."""
    before = signal.getsignal(signal.SIGTERM)
    for batch in (0, 1):  # two interruptions in one epoch
        with pytest.raises(SystemExit) as caught:
            fit(network(), 2, ChiefBackup(tmp_path), Terminate(batch))
        assert caught.value.code == 128 + signal.SIGTERM
        line = f"training is backed up after batch {batch + 1} of epoch 2"
        assert line in capsys.readouterr().err
        newest = f"epoch-000001_batch-00000000{batch + 1}.weights.h5"
        assert names(tmp_path)[-1] == newest
        assert signal.getsignal(signal.SIGTERM) is before
    again = network()
    assert fit(again, 2, ChiefBackup(tmp_path)).epoch == [1]
    assert f"{newest}' after batch 2 of epoch 2\n" in capsys.readouterr().err
    assert_same(everything(again), whole[2])
    assert names(tmp_path) == []


def test_sigterm_in_an_execution_past_the_data(tmp_path: Path) -> None:
    """Three batches in executions of two."""

    def compiled() -> Any:
        model = network()
        model.compile(model.optimizer, loss(), steps_per_execution=2)
        return model

    whole, resumed = compiled(), compiled()
    fit(whole, 2)
    with pytest.raises(SystemExit):
        fit(compiled(), 2, ChiefBackup(tmp_path), Terminate(2))
    fit(resumed, 2, ChiefBackup(tmp_path))
    assert_same(everything(resumed), everything(whole))


def test_sigterm_after_the_last_batch(tmp_path: Path) -> None:
    """The previous handler receives the signal, and again after `fit`."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda x, _: received.append(x))
    try:
        fit(network(), 1, ChiefBackup(tmp_path), Terminate(None))
        assert received == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert len(received) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_fit_in_another_thread_cannot_handle_sigterm(tmp_path: Path) -> None:
    """As under Ray: `fit` warns and backs up epochs only."""
    before = signal.getsignal(signal.SIGTERM)
    backup = ChiefBackup(tmp_path, delete_checkpoint=False)
    with (
        pytest.warns(UserWarning, match="cannot answer SIGTERM"),
        ThreadPoolExecutor(1) as thread,
    ):
        assert thread.submit(fit, network(), 1, backup).result().epoch == [0]
    assert names(tmp_path) == ["epoch-000001.weights.h5"]
    assert signal.getsignal(signal.SIGTERM) is before
