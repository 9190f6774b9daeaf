"""What is written by hand does what the library does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from benchmarks import bare_training
from benchmarks.bare_training import BareTraining
from benchmarks.data import make_batch
from benchmarks.keras_models import build
from benchmarks.task import Task

RATE, STEPS, BATCH = 0.3, 6, 16  # a rate large enough for the clip


def bare(
    model: str, optimizer: str = "bare-kfac", mode: str = "function"
) -> BareTraining:
    return BareTraining(Task(model, optimizer, {}, BATCH, mode))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("mlp-24x3", id="by rows"),
        pytest.param("mlp-3x2", id="by matrices"),
    ],
)
def test_kfac(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_training, "RATE", RATE)
    by_hand = bare(model)
    for _ in range(STEPS):
        by_hand.step(True, tuple(range(len(by_hand.weights))))
    keras.utils.set_random_seed(0)
    network = build(model)
    network.compile(
        tfkfac.KFAC(
            keras.optimizers.SGD(RATE, 0.9),
            fisher="empirical",
            factor_update_interval=1,
            inverse_update_interval=1,
            factor_batch_fraction=1.0,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = make_batch(model, BATCH)
    for _ in range(STEPS):
        network.train_on_batch(x, y)
    for weight, layer in zip(by_hand.weights, network.layers, strict=True):
        both = tf.concat([layer.kernel, layer.bias[None]], 0)
        np.testing.assert_allclose(weight, both, rtol=1e-3, atol=1e-4)
