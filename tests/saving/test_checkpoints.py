"""Training resumes exactly from backups and checkpoints."""

import io
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.saved_models import compiled, train
from tests.support.small import (
    assert_same,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    mlp,
)

X, Y = data()


def test_backup_and_restore(tmp_path: Path) -> None:
    """Killed in the third epoch, started again: the run nobody killed."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    def run(*callbacks: Any) -> Any:
        model = compiled("sequential", "adam")
        model.fit(
            X,
            Y,
            batch_size=4,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return model

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(keras.callbacks.BackupAndRestore(tmp_path / "backup"), Stop())
    again = run(keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    assert int(kfac_of(again).iterations) == 16
    assert_same(everything(again), everything(whole))


def test_checkpoint_restored_before_the_first_step(tmp_path: Path) -> None:
    """The usual order of a custom loop: attach, restore, train."""
    runs = []
    for restored in (False, True):
        model = mlp()
        optimizer = tfkfac.KFAC(factor_update_interval=3).attach(model)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if restored:
            saved.restore(str(tmp_path / "checkpoint-1"))
        for step in range(2 * restored, 4):
            x, y = data(seed=step)
            gradients = gradients_of(model, x, y)
            optimizer.apply(gradients, model.trainable_variables)
            if step == 1:
                saved.save(str(tmp_path / "checkpoint"))
        weights = {str(i): w for i, w in enumerate(model.get_weights())}
        runs.append({**weights, **curvature(optimizer)})
    assert_same(runs[1], runs[0])


def test_checkpoints_have_what_files_have() -> None:
    """And not one worker's variables, which are of no use to another."""
    model = compiled("sequential")
    train(model, 0, 5)
    kept = kfac_of(model)._saved_state
    store = curvature(kfac_of(model))
    assert {k.split(":")[0] for k in store} == {"state", "inverse"}
    with np.load(io.BytesIO(kept.serialize())) as file:
        assert_same(dict(file), store)
