"""Loss scaling for float16 on several workers.

`integration/test_same_runs.py` has one process.
"""

from typing import Any

import keras
import numpy as np
import pytest

import tfkfac
from tests.support.marks import with_slow
from tests.support.small import loss
from tests.support.strategies import copies, strategy
from tests.support.training import (
    FEEDS,
    assert_same_bits,
    dataset,
    images,
    shares,
    small,
)

OPTIMIZERS = {
    "KFAC": lambda: tfkfac.KFAC(0.1, only_layers="hidden"),
    "MR-DHO2": lambda: tfkfac.FOSI(warmup_steps=1, accelerator_fraction=0.5),
}


def overflow(name: str) -> Any:
    """Train in float16; the gradients of worker 0 overflow in step 2."""
    scales: list[float] = []

    class Scales(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            scales.append(float(self.model.optimizer.dynamic_scale.numpy()))

    x, y = images()
    steps = shares(FEEDS["even"], strategy().num_replicas_in_sync)[:6]
    keras.config.set_dtype_policy("mixed_float16")
    with strategy().scope():
        keras.utils.set_random_seed(0)
        scaler = tfkfac.LossScaleOptimizer(OPTIMIZERS[name](), 8.0, 3)
        model = small()
        model.compile(scaler, loss())
    history = model.fit(
        dataset((x.astype("float32"), y), steps, [(2, 0, 1e30)]),
        steps_per_epoch=6,
        verbose=0,
        callbacks=[Scales()],
    ).history
    keras.config.set_dtype_policy("float32")
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]
    assert int(scaler.iterations.numpy()) == 5
    assert np.isfinite(history["loss"]).all()
    scale = [scaler.dynamic_scale, scaler.step_counter]
    return {"copies": copies([*model.variables, *scale])}


RUNS = [f"two: {name}" for name in OPTIMIZERS]


@pytest.mark.parametrize(
    "name", with_slow([*RUNS, "mirrored: KFAC"], *RUNS[1:], "mirrored: KFAC")
)
def test_all_workers_agree(on_workers: Any, name: str) -> None:
    """An overflow on one worker: all skip and halve the scale."""
    where, optimizer = name.split(": ")
    workers = on_workers(where, overflow, optimizer)
    assert_same_bits(workers)
    for value in workers[0]["copies"][0]:
        assert np.isfinite(value).all()
