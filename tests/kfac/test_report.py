"""What the last step did, and the hint that the clip rules them all."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import randomize, weights_of
from tests.support.reference import (
    append_one,
    clip_factor,
    factors,
    gradient,
    inverse_solve,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = RNG.normal(size=(8, 2)).astype("float32")
RATE, DAMPING = 0.5, 0.125


def model_of(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="d")])
    randomize(model)
    inner = keras.optimizers.SGD(RATE)
    options |= {"damping": DAMPING, "fisher": "empirical"}
    model.compile(tfkfac.KFAC(inner, **options), "mse")
    return model


@pytest.mark.parametrize("kl_clip", [1e-3, 100.0, None])
def test_last_step(kl_clip: float | None) -> None:
    model = model_of(kl_clip=kl_clip)
    assert model.optimizer.last_step == {}
    a = append_one(X.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - Y
    W = gradient(a[:, None], g[:, None])
    P = inverse_solve(W, *factors(a[:, None], g[:, None]), DAMPING)
    nu = clip_factor([(P, W)], RATE, kl_clip)
    assert (nu < 1) == (kl_clip == 1e-3)
    model.train_on_batch(X, Y)
    got = model.optimizer.last_step
    assert set(got) == {"clip_factor", "length", "damping"}
    length = RATE**2 * np.sum(P * W) * nu**2
    assert got["clip_factor"] == pytest.approx(nu, rel=1e-4)
    assert got["length"] == pytest.approx(length, rel=1e-4)
    assert got["damping"] == pytest.approx(DAMPING)


@pytest.mark.parametrize("kl_clip", [1e-12, 1e12])
def test_the_hint_is_given_once(kl_clip: float, capfd: Any) -> None:
    model = model_of(kl_clip=kl_clip)
    data = tf.data.Dataset.from_tensors((X, Y)).repeat()
    model.fit(data, epochs=1, steps_per_epoch=199, verbose=0)
    assert "kl_clip" not in capfd.readouterr().err
    model.fit(data, epochs=2, steps_per_epoch=201, verbose=0)
    hints = capfd.readouterr().err.count("kl_clip has left less than 25%")
    assert hints == (kl_clip == 1e-12)
    lines: list[str] = []
    model.optimizer.summary(print_fn=lines.append)
    assert ("kl_clip ruled" in lines[0]) == (kl_clip == 1e-12)


@pytest.mark.parametrize("loss", ["mean", "sum", "token means", "token sums"])
@pytest.mark.parametrize("ends", ["plainly", "after a normalisation"])
def test_a_summed_loss_of_a_custom_loop_is_told(
    loss: str, ends: str, capfd: Any
) -> None:
    """Of a cross-entropy; a mean over examples is never taken for a sum."""
    normalised = [layers.LayerNormalization()] if ends != "plainly" else []
    model = keras.Sequential(
        [keras.Input((4, 3)), layers.Dense(5), *normalised, layers.Dense(3)]
    )
    optimizer = tfkfac.KFAC().attach(model)
    x = RNG.normal(size=(8, 4, 3)).astype("float32")
    labels = RNG.integers(0, 3, size=(8, 4))
    for _ in range(2):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, model(x, training=True)
            )
            total = {
                "mean": tf.reduce_mean(losses[:, 0]),
                "sum": tf.reduce_sum(losses),
                "token means": tf.reduce_mean(losses),
                "token sums": tf.reduce_mean(tf.reduce_sum(losses, 1)),
            }[loss]
        variables = model.trainable_variables
        optimizer.apply(
            tape.gradient(total, [v.value for v in variables]), variables
        )
    said = capfd.readouterr().err.count("the loss looks like the sum")
    assert said == (loss == "sum")


@pytest.mark.parametrize("terms", [None, 1])
def test_a_loop_is_told_what_its_loss_is_taken_for(terms: Any) -> None:
    """Of a squared error nothing shows that it is a sum."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    optimizer = tfkfac.KFAC().attach(model, loss_terms=terms)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(np.ones((4, 3)))))
            variables = model.trainable_variables
            optimizer.apply(
                tape.gradient(loss, [v.value for v in variables]), variables
            )
    said = [str(one.message) for one in caught if "1 for a sum" in str(one)]
    assert len(said) == (terms is None)
