"""What drawing labels does to a step: nothing but other factors G."""

import itertools
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close, find
from tests.support.reference import Array
from tfkfac.kfac.active import label_seeds

RNG = np.random.default_rng(1)
X = RNG.normal(size=(8, 6)).astype("float32")
Y = RNG.normal(size=(8, 3)).astype("float32")


def network(dropout: float = 0.5) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(20, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(dropout),
            layers.Dense(3, name="out"),
        ]
    )


def compiled(
    fisher: str = "monte_carlo", dropout: float = 0.5, **options: Any
) -> Any:
    model = network(dropout)
    model.compile(
        tfkfac.KFAC(fisher=fisher, **options), "mse", run_eagerly=True
    )
    return model


def test_the_masks_of_dropout_are_those_of_the_step() -> None:
    """Where a single example's unit was dropped, nothing flows back."""
    model = network()
    model = keras.Sequential(
        [keras.Input((6,)), *model.layers[::2], model.layers[-1]]
    )
    model.compile(tfkfac.KFAC(), "mse", run_eagerly=True)
    model.train_on_batch(X[:1], Y[:1])
    found = model.optimizer.factors()
    dropped = np.diag(find(found, "out")["A"])[:-1] == 0
    silent = np.diag(find(found, "hidden")["G"]) == 0
    assert 0 < dropped.sum() < 20
    np.testing.assert_array_equal(silent, dropped)


def test_no_state_changes() -> None:
    """Moving statistics and seeds are those of a step without draws."""
    kept = []
    for fisher in ("empirical", "monte_carlo", "type2"):
        model = compiled(fisher, learning_rate=0.0)
        weights_after(model, 2)
        kept.append([v.numpy() for v in model.non_trainable_variables])
    for other in kept[1:]:
        for want, got in zip(kept[0], other, strict=True):
            np.testing.assert_array_equal(got, want)


def weights_after(model: Any, steps: int) -> list[Array]:
    for _ in range(steps):
        model.train_on_batch(X, Y)
    return list(model.get_weights())


def test_micro_batches_draw_their_own_labels() -> None:
    """Two of the same rows are not twice the same statistic."""
    model = compiled(dropout=0.0, gradient_accumulation_steps=2)
    weights_after(model, 2)
    once = compiled(dropout=0.0)
    weights_after(once, 1)
    two, one = (find(m.optimizer.factors(), "out")["G"] for m in (model, once))
    assert np.linalg.norm(two - one) > 0.05 * np.linalg.norm(one)


def test_a_layer_that_no_output_depends_on_keeps_its_gradient() -> None:
    """A loss of its own trains it: its G is that of the loss, L = mean h^2."""

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
    found = optimizer.factors()
    # Its gradient 2/3 h, in the unit 2/3 of the squares, is h.
    h = X @ kernel
    assert_close(find(found, "side")["G"], h.T @ h / len(X), 2e-5)
    assert_close(find(found, "out")["G"], np.eye(3), 2e-5)


def test_every_replica_and_micro_batch_has_seeds_of_its_own() -> None:
    """Two outputs, three replicas, two micro-batches, two steps."""
    seen = set()
    for clock, rank, count in itertools.product(range(2), range(3), range(2)):
        step: Any = types.SimpleNamespace(
            job=types.SimpleNamespace(clock=tf.constant(clock, tf.int64)),
            group=types.SimpleNamespace(rank=rank, size=3),
        )
        pending = types.SimpleNamespace(count=tf.constant(count, tf.int64))
        state: Any = types.SimpleNamespace(pending=pending)
        seeds = label_seeds(step, state, 2)
        seen.update(tuple(seed.numpy()) for seed in seeds)
    assert len(seen) == 2 * 3 * 2 * 2
