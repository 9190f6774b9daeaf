"""Training resumes exactly from backups and checkpoints."""

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfkfac
from tests.support.saved_models import compiled
from tests.support.small import (
    assert_same,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    mlp,
)


def test_backup_and_restore(tmp_path: Path) -> None:
    """A run interrupted in epoch 3 and resumed equals a whole run."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    def run(*callbacks: Any) -> Any:
        model = compiled("sequential", "adam")
        model.fit(
            *data(8),
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
    assert int(kfac_of(again).iterations) == 8
    assert_same(everything(again), everything(whole))


def test_checkpoint_restored_before_the_first_step(tmp_path: Path) -> None:
    """The order of a custom loop: attach, restore, train."""
    runs = []
    for restored in (False, True):
        model = mlp()
        optimizer = tfkfac.KFAC(factor_update_interval=3).attach(model)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if restored:
            saved.restore(str(tmp_path / "checkpoint-1"))
        for step in range(2 * restored, 4):
            gradients = gradients_of(model, *data(seed=step))
            optimizer.apply(gradients, model.trainable_variables)
            if step == 1:
                saved.save(str(tmp_path / "checkpoint"))
        weights = {str(i): w for i, w in enumerate(model.get_weights())}
        runs.append({**weights, **curvature(optimizer)})
    assert_same(runs[1], runs[0])
