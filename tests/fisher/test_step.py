"""Training steps with sampled labels differ only in the factors G."""

import itertools
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close, find
from tfkfac.kfac.active import label_seeds

RNG = np.random.default_rng(1)
X = RNG.normal(size=(8, 6)).astype("float32")
Y = RNG.normal(size=(8, 3)).astype("float32")


def network() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(20, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5),
            layers.Dense(3, name="out"),
        ]
    )


def test_dropout_mask_of_the_forward_pass_is_reused() -> None:
    """With one example, G of a dropped unit is 0."""
    model = network()
    model = keras.Sequential(
        [keras.Input((6,)), *model.layers[::2], model.layers[-1]]
    )
    model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=True)
    model.train_on_batch(X[:1], Y[:1])
    factors = model.optimizer.factors()
    dropped = np.diag(find(factors, "out")["A"])[:-1] == 0
    no_gradient = np.diag(find(factors, "hidden")["G"]) == 0
    assert 0 < dropped.sum() < 20
    np.testing.assert_array_equal(no_gradient, dropped)


def test_no_state_changes() -> None:
    """Moving statistics and seeds equal a step with `fisher="empirical"`."""
    states = []
    for fisher in ("empirical", "monte_carlo", "type2"):
        model = network()
        optimizer = tfkfac.KFAC(
            step="natural", fisher=fisher, learning_rate=0.0
        )
        model.compile(optimizer, "mse", run_eagerly=True)
        model.train_on_batch(X, Y)
        states.append([v.numpy() for v in model.non_trainable_variables])
    for other in states[1:]:
        for want, got in zip(states[0], other, strict=True):
            np.testing.assert_array_equal(got, want)


def test_layer_with_added_loss_uses_the_empirical_gradient() -> None:
    """The layer is trained by `add_loss` alone, so G is of this loss."""

    class Penalised(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.side = layers.Dense(2, use_bias=False, name="side")

        def call(self, x: Any) -> Any:
            h = self.side(x)
            self.add_loss(tf.reduce_mean(tf.reduce_sum(h**2, -1)) / 3)
            return x

    inputs = keras.Input((6,))
    outputs = layers.Dense(3, name="out")(Penalised()(inputs))
    model = keras.Model(inputs, outputs)
    optimizer = tfkfac.KFAC(fisher="type2", learning_rate=0.0)
    model.compile(optimizer, "mse", run_eagerly=True)
    (kernel,) = (
        v.numpy() for v in model.trainable_variables if "side" in v.path
    )
    model.train_on_batch(X, Y)
    factors = optimizer.factors()
    # The gradient is 2/3 h; divided by the unit 2/3 of `mse`, it is h.
    h = X @ kernel
    assert_close(find(factors, "side")["G"], h.T @ h / len(X), 2e-5)
    assert_close(find(factors, "out")["G"], np.eye(3), 2e-5)


def test_seeds_are_unique() -> None:
    """For 2 outputs, 3 replicas, 2 micro-batches and 2 steps."""
    all_seeds = set()
    for clock, rank, count in itertools.product(range(2), range(3), range(2)):
        step: Any = types.SimpleNamespace(
            job=types.SimpleNamespace(clock=tf.constant(clock, tf.int64)),
            group=types.SimpleNamespace(rank=rank, size=3),
        )
        pending = types.SimpleNamespace(count=tf.constant(count, tf.int64))
        state: Any = types.SimpleNamespace(pending=pending)
        seeds = label_seeds(step, state, 2)
        all_seeds.update(tuple(seed.numpy()) for seed in seeds)
    assert len(all_seeds) == 2 * 3 * 2 * 2
