"""Backups of one process: whole, exact, and said when they cannot be made."""

import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    data,
    everything,
    loss,
)
from tfkfac.callbacks import ChiefBackup


class StopBefore(keras.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise KeyboardInterrupt


def network(optimizer: Any = None) -> Any:
    """With a layer whose random numbers go on."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(5, activation="tanh"),
            layers.Dropout(0.5, seed=1),
            layers.Dense(CLASSES),
        ]
    )
    optimizer = optimizer or tfkfac.KFAC(
        keras.optimizers.Adam(1e-2),
        factor_update_interval=3,
        inverse_update_interval=5,
    )
    model.compile(optimizer, loss(), run_eagerly=True)
    return model


def fit(model: Any, epochs: int, *callbacks: Any) -> Any:
    return model.fit(
        *data(12),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_run_that_was_stopped_is_the_run(tmp_path: Path) -> None:
    """To the last bit, with curvature, slots and random layers."""
    whole = network()
    fit(whole, 4)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), 4, ChiefBackup(tmp_path), StopBefore(3))
    assert names(tmp_path) == [f"epoch-00000{i}.weights.h5" for i in (2, 3)]
    again = network()
    history = fit(again, 4, ChiefBackup(tmp_path, delete_checkpoint=False))
    assert history.epoch == [3]
    assert_same(everything(again), everything(whole))
    # Another `fit` of the same model begins where it is told to.
    assert fit(again, 2).epoch == [0, 1]
    assert fit(again, 5, ChiefBackup(tmp_path)).epoch == [4]
    assert names(tmp_path) == []


def test_a_damaged_backup(tmp_path: Path) -> None:
    """The one before it, said; what a killed job left is removed."""
    with pytest.raises(KeyboardInterrupt):
        fit(network(), 4, ChiefBackup(tmp_path), StopBefore(2))
    newest = tmp_path / "epoch-000002.weights.h5"
    newest.write_bytes(newest.read_bytes()[:1000])
    (tmp_path / ".writing-epoch-000003.weights.h5").touch()
    model = network()
    with pytest.warns(UserWarning, match="epoch-000002.* cannot be read"):
        assert fit(model, 3, ChiefBackup(tmp_path)).epoch == [1, 2]
    assert names(tmp_path) == []


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The last good backup stays, it is said, and training goes on.

    A limit of the operating system stands in for the end of the disk.
    """
    model = network()
    with pytest.raises(KeyboardInterrupt):
        fit(model, 3, ChiefBackup(tmp_path), StopBefore(1))
    first = tmp_path / "epoch-000001.weights.h5"
    before = first.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.warns(UserWarning, match="Epoch 2 cannot be backed"):
            fit(model, 2, ChiefBackup(tmp_path, delete_checkpoint=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [first.name]
    assert first.read_bytes() == before


def test_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with an optimizer of tfkfac"):
        fit(network("sgd"), 1, ChiefBackup(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        fit(network(), 2, ChiefBackup(tmp_path), StopBefore(1))
    with pytest.raises(ValueError, match="Skipping variable loading"):
        fit(network(tfkfac.KFAC("sgd")), 2, ChiefBackup(tmp_path))


class Terminate(keras.callbacks.Callback):
    """Sends this process SIGTERM in the last epoch."""

    def __init__(self, batch: int | None) -> None:
        super().__init__()
        self.batch = batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.is_last = epoch + 1 == self.params["epochs"]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.is_last and batch == self.batch:
            signal.raise_signal(signal.SIGTERM)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.is_last and self.batch is None:
            signal.raise_signal(signal.SIGTERM)


def test_a_job_that_is_asked_to_end(tmp_path: Path, capsys: Any) -> None:
    """It backs up in the middle of an epoch, and goes on there."""
    whole = network()
    fit(whole, 2)
    before = signal.getsignal(signal.SIGTERM)
    for batch in (0, 1):  # one after the other, in one epoch
        job = network()
        with pytest.raises(SystemExit) as caught:
            fit(job, 2, ChiefBackup(tmp_path), Terminate(batch))
        assert caught.value.code == 128 + signal.SIGTERM
        said = (
            f"SIGTERM: training is backed up after batch {batch + 1} of epoch 2"
        )
        assert said in capsys.readouterr().err
        newest = f"epoch-000001_batch-00000000{batch + 1}.weights.h5"
        assert names(tmp_path)[-1] == newest
        assert signal.getsignal(signal.SIGTERM) is before
    again = network()
    assert fit(again, 2, ChiefBackup(tmp_path)).epoch == [1]
    assert_same(everything(again), everything(whole))
    assert names(tmp_path) == []


def test_a_signal_that_comes_too_late(tmp_path: Path) -> None:
    """It is for whoever has had it before."""
    seen: list[int] = []
    before = signal.signal(
        signal.SIGTERM, lambda number, _: seen.append(number)
    )
    try:
        fit(network(), 1, ChiefBackup(tmp_path), Terminate(None))
        assert seen == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            fit(network(), 1, ChiefBackup(tmp_path), StopBefore(0))
        signal.raise_signal(signal.SIGTERM)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_cannot_catch_it(tmp_path: Path) -> None:
    """As where Ray trains; it is said, and epochs are backed up."""
    before = signal.getsignal(signal.SIGTERM)
    backup = ChiefBackup(tmp_path, delete_checkpoint=False)
    with (
        pytest.warns(UserWarning, match="cannot answer SIGTERM"),
        ThreadPoolExecutor(1) as thread,
    ):
        assert thread.submit(fit, network(), 1, backup).result().epoch == [0]
    assert names(tmp_path) == ["epoch-000001.weights.h5"]
    assert signal.getsignal(signal.SIGTERM) is before


# --------------------------------------------------------- a real end of a job
TRAIN = """
import sys
from tests.callbacks.test_backup import *
fit(wide(), 1000, ChiefBackup(sys.argv[1]))
"""


def wide() -> Any:
    """Whose backup takes a while."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(1000), layers.Dense(CLASSES)]
    )
    model.compile(tfkfac.KFAC(), loss())
    return model


def wait_for(job: subprocess.Popen[bytes], folder: Path, pattern: str) -> None:
    end = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert job.poll() is None, job.communicate()[1].decode()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_while_writing(tmp_path: Path) -> None:
    """Twice at any moment of it: the last good backup loads."""
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    for attempt in range(2):
        job = subprocess.Popen(command, stderr=subprocess.PIPE)
        wait_for(job, tmp_path, f"epoch-*{attempt + 1}.weights.h5")
        wait_for(job, tmp_path, ".writing-*")
        time.sleep(0.008 * attempt)
        job.send_signal(signal.SIGKILL)
        job.wait()
        model = wide()
        callback = ChiefBackup(tmp_path, delete_checkpoint=False)
        assert fit(model, 1, callback, StopBefore(0)).epoch == []
        assert int(model.optimizer.iterations) >= 3
        assert np.isfinite(model.get_weights()[0]).all()
        assert not list(tmp_path.glob(".writing-*"))
