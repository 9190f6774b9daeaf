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
from benchmarks.task import Task, UnavailableError

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


def test_layers_take_turns() -> None:
    by_hand = bare("mlp-4x3")
    by_hand.set_intervals(2, 6)
    method = by_hand.method
    assert [method.due(step) for step in range(7)] == [
        (True, (0, 1, 2)),
        (False, ()),
        (True, (1,)),
        (False, ()),
        (True, (2,)),
        (False, ()),
        (True, (0,)),
    ]


def test_fosi() -> None:
    """The first step: SGD's, and once more what it has in the directions."""
    by_hand, sgd = bare("mlp-4x2", "bare-fosi"), bare("mlp-4x2", "bare-fosi")
    for own in sgd.method.directions:
        own.assign(tf.zeros_like(own))
    before = np.concatenate([w.numpy().ravel() for w in by_hand.weights])
    by_hand.step()
    sgd.step()
    basis = np.concatenate(
        [own.numpy() for own in by_hand.method.directions], 1
    )
    moved, plain = (
        np.concatenate([w.numpy().ravel() for w in one.weights]) - before
        for one in (by_hand, sgd)
    )
    expected = plain + basis.T @ (basis @ plain)
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(("model", "mode"), [("M2", "function"), ("M1", "fit")])
def test_refused(model: str, mode: str) -> None:
    with pytest.raises(UnavailableError, match="by hand"):
        bare(model, mode=mode)
