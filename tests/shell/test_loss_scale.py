"""Loss scaling for float16, on one device and on several workers."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support import workers_unsound
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    curvature,
    data,
    loss,
)
from tests.support.weights import assert_same_bits

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


SCALERS = {
    "ours": tfkfac.LossScaleOptimizer,
    "Keras'": keras.optimizers.LossScaleOptimizer,
}


@pytest.mark.parametrize(
    "name", ["ours", pytest.param("Keras'", marks=pytest.mark.slow)]
)
def test_a_bad_batch_leaves_no_trace(name: str) -> None:
    """A bad batch halves the scale; all else has equal bits."""
    found = []
    for bad in (True, False):
        scaler = SCALERS[name](tfkfac.KFAC(), dynamic_growth_steps=3)
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
    assert state.pop(counter) == (name == "ours")
    assert want_state.pop(counter) == 0
    assert_same(state, want_state)


@pytest.mark.slow
def test_overflow_at_every_scale() -> None:
    """Training ends, with tfkfac's and Keras' loss scaling."""
    for make in SCALERS.values():
        model = compiled(make(tfkfac.KFAC(max_skipped_steps=2)))
        with pytest.raises(FloatingPointError, match="2 steps in a row"):
            model.fit(np.full_like(X, np.nan), Y, 8, verbose=0)


# ------------------------------------------------------------ several workers
JOBS = Jobs(workers_unsound)
for where_, optimizer_, slow_ in [
    ("two", "kfac", False),
    ("two", "dp_kfac", True),
    ("two", "fosi", True),
    ("two", "accelerator", True),
    ("mirrored", "kfac", True),
]:
    JOBS.add(f"{where_}: {optimizer_}", "half", optimizer_, slow=slow_)
NAMES = [f"two: {o}" for o in ("kfac", "dp_kfac", "fosi", "accelerator")]


@pytest.mark.parametrize("name", JOBS.params([*NAMES, "mirrored: kfac"]))
def test_all_workers_agree(pool: Pool, name: str) -> None:
    """An overflow on one worker: all skip and halve the scale."""
    workers = JOBS.results(pool, name)
    assert_same_bits(workers)
    for worker in workers:
        assert worker["scales"] == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]
        assert worker["iterations"] == 5
        assert all(np.isfinite(w).all() for w in worker["copies"][0])
        assert np.isfinite(worker["losses"]).all()
