"""A job that loses a worker goes on with the others."""

import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
EPOCHS = 3
# The last of four workers is lost when the second epoch has been backed up.
PROGRAM = f"""
import os, pathlib, signal, sys, time
import keras, numpy as np
import tfkfac

folder = pathlib.Path(sys.argv[1])
strategy = tfkfac.MultiWorkerMirroredStrategy()
workers = strategy.num_replicas_in_sync
index = strategy.cluster_resolver.task_id
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 6)).astype("float32")
y = np.tanh(x @ rng.normal(size=(6, 2))).astype("float32")
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(tfkfac.KFAC(distribution="hybrid_opt" if workers == 4
                              else "mem_opt", factor_update_interval=2), "mse")

def begin(epoch, logs=None):
    if epoch == 2 and (workers, index) == (4, 3):
        (folder / "lost").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

def end(batch, logs=None):
    if workers == 3 and index == 0 and not (folder / "on").exists():
        (folder / "on").write_text(repr(time.time()))

kill = keras.callbacks.LambdaCallback(on_epoch_begin=begin,
                                      on_train_batch_end=end)
backup = tfkfac.callbacks.ChiefBackup(folder / "backup", False)
model.fit(x, y, batch_size=24, epochs={EPOCHS}, shuffle=False, verbose=0,
          callbacks=[backup, kill])
if index == 0:
    np.savez(folder / f"weights_{{workers}}.npz", *model.get_weights())
"""


def job(folder: pathlib.Path, workers: int, *options: str) -> int:
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), *options]
    program = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(
        [*launcher, str(workers), "--", *program],
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode not in (0, 128 + signal.SIGKILL):
        raise AssertionError(done.stderr[-3000:])
    return done.returncode


@pytest.mark.slow
def test_three_go_on_as_three_that_load_the_backup(
    tmp_path: pathlib.Path,
) -> None:
    """Within a minute, and to the last bit."""
    folders = stopped, elastic = tmp_path / "stopped", tmp_path / "elastic"
    for folder in folders:
        folder.mkdir()
    assert job(stopped, 4) == 128 + signal.SIGKILL
    assert not list(stopped.glob("weights*"))
    assert job(stopped, 3) == 0
    assert job(elastic, 4, "--min-workers", "3") == 0
    want, got = (dict(np.load(folder / "weights_3.npz")) for folder in folders)
    assert want.keys() == got.keys() and len(want) == 4
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
    lost, on = (float((elastic / name).read_text()) for name in ("lost", "on"))
    assert 0 < on - lost < 60
