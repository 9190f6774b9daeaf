"""Loss scaling for float16, on one device and on several workers."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.marks import with_slow
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    curvature,
    data,
    loss,
)
from tests.support.strategies import copies, strategy
from tests.support.training import (
    FEEDS,
    assert_same_bits,
    dataset,
    images,
    shares,
    small,
)

X, Y = data(32)


@pytest.fixture(autouse=True)
def mixed() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def compiled(scaler: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(6, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )

    model.compile(scaler, loss())
    return model


def test_a_bad_batch_leaves_no_trace() -> None:
    """A bad batch halves the scale; all else has equal bits."""
    found = []
    for bad in (True, False):
        scaler = tfkfac.LossScaleOptimizer(
            tfkfac.KFAC(step="natural"), dynamic_growth_steps=3
        )
        model = compiled(scaler)
        scales = []
        for step in range(6):
            x = X.copy()
            if step == 1:
                x[3] = np.nan
            if step == 1 and not bad:
                scaler.dynamic_scale.assign(2.0**14)
                scaler.step_counter.assign(0)
            else:
                metrics = model.train_on_batch(x, Y, return_dict=True)
                assert np.isfinite(metrics["loss"]) == (step != 1)
            scales.append(float(scaler.dynamic_scale))
        state = curvature(scaler.inner_optimizer)
        values = [np.array(v) for v in model.variables]
        found.append((values, state, scales))
    (values, state, scales), (want, want_state, want_scales) = found
    powers = [15, 14, 14, 14, 15, 15]
    assert scales == want_scales == [2.0**n for n in powers]
    for got, value in zip(values, want, strict=True):
        np.testing.assert_array_equal(got, value)
    counter = "state:skipped_steps:"
    assert state.pop(counter) == 1
    assert want_state.pop(counter) == 0
    assert_same(state, want_state)


# ------------------------------------------------------------ several workers
OPTIMIZERS = {
    "KFAC": tfkfac.KFAC,
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
