"""A strategy of a single replica changes nothing."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac

STRATEGIES: dict[str, Callable[[], Any]] = {
    "multi worker": tfkfac.MultiWorkerMirroredStrategy,
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "kfac": tfkfac.KFAC,
    "adam": lambda: tfkfac.KFAC(
        keras.optimizers.Adam(
            0.01, use_ema=True, ema_overwrite_frequency=2, weight_decay=1e-3
        )
    ),
    "accumulation": lambda: tfkfac.KFAC(gradient_accumulation_steps=2),
    "fosi": lambda: tfkfac.FOSI(warmup_steps=2, update_interval=3),
    "fosi of sgd": lambda: tfkfac.FOSI(
        "sgd", warmup_steps=2, update_interval=3
    ),
}


def trained(scope: Any, optimizer: str) -> list[Any]:
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(optimizer=OPTIMIZERS[optimizer](), loss="mse")
    x = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
    model.fit(x, x[:, 1:], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return list(model.get_weights())


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        pytest.param(
            strategy,
            optimizer,
            marks=[] if (strategy, optimizer) == ("multi worker", "kfac")
            else pytest.mark.slow,
        )
        for strategy in STRATEGIES
        for optimizer in OPTIMIZERS
    ],
)  # fmt: skip
def test_equals_no_strategy(strategy: str, optimizer: str) -> None:
    want = trained(contextlib.nullcontext(), optimizer)
    got = trained(STRATEGIES[strategy]().scope(), optimizer)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
