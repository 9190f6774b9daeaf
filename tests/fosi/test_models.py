"""FOSI with several types of models, layers and losses."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD

from tests.support.curvature_models import difference_products, weight_count
from tests.support.fosi_reference import FEATURES, ROWS, small
from tests.support.harness import randomize
from tests.support.small import curvature


# ----------------------------------------------------------- Hessians of models
def head(body: Callable[[Any], Any]) -> Any:
    """A model of an input, a tanh layer, `body` and two units."""
    x = keras.Input((FEATURES,))
    first = layers.Dense(2, "tanh", name="first")
    return keras.Model(x, layers.Dense(2, name="last")(body(first(x))))


class Subclassed(keras.Model):
    """A model that is built by the first batch; one layer has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(2, "tanh")
        self.unused = layers.Dense(2)
        self.last = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        h = self.first(inputs)
        self.unused(h)
        return self.last(h)


MODELS: dict[str, Callable[[], Any]] = {
    "batch_norm": lambda: head(lambda h: layers.BatchNormalization()(h)),
    "dropout": lambda: head(lambda h: layers.Dropout(0.5, seed=3)(h)),
    "subclassed": Subclassed,
}


def batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(4)
    return rng.normal(size=(ROWS, FEATURES)), rng.normal(size=(ROWS, 2))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", MODELS)
def test_directions(name: str, double: None) -> None:
    """Ritz pairs are of the batch's Hessian, by finite differences.

    The rates are zero. A replay of the forward pass draws the random numbers
    of the next pass and changes no seed.
    """
    x, y = batch()
    model = MODELS[name]()
    if model.built:
        randomize(model)
    steps = 18 if name == "subclassed" else weight_count(model)
    optimizer = small(SGD(0.0), alpha=0.0, warmup_steps=0, lanczos_steps=steps)
    # Eager where a trace would take most of the time.
    model.compile(optimizer, "mse", run_eagerly=name != "subclassed")
    model.train_on_batch(x, y)
    (directions,) = (
        v for k, v in curvature(optimizer).items() if "directions" in k
    )
    images = difference_products(
        model, directions.T, tf.constant(x), tf.constant(y)
    )
    want = directions.T * optimizer.spectrum()
    assert optimizer.spectrum()[0] > 0.1
    scale = np.abs(want).max()
    np.testing.assert_allclose(images / scale, want / scale, rtol=0, atol=1e-6)
    if name == "subclassed":
        still = model.unused.get_weights()
        model.optimizer.learning_rate, model.optimizer.alpha = 0.1, 0.1
        model.train_on_batch(x, y)
        for got, before in zip(model.unused.get_weights(), still, strict=True):
            np.testing.assert_allclose(got, before, rtol=0, atol=1e-12)


# ------------------------------------------------------------ state of layers
def test_state_moves_once_per_step() -> None:
    """Estimations do not update moving statistics a second time."""
    x, y = batch()
    x = x.astype("float32")
    models = []
    for wrap in (True, False):
        keras.utils.set_random_seed(0)
        body = keras.Sequential(
            [layers.BatchNormalization(momentum=0.8), layers.Dropout(0.5)]
        )
        model = head(body)
        inner = SGD(0.1)
        options = {"warmup_steps": 0, "update_interval": 1}
        model.compile(small(inner, **options) if wrap else inner, "mse")
        models.append(model)
    model, twin = models
    twin.set_weights(model.get_weights())
    norm, drop = model.layers[2].layers
    first, mean = model.get_layer("first"), np.zeros(2)
    for _ in range(5):
        kernel, bias = first.get_weights()
        hidden = np.tanh(x @ kernel + bias)
        mean = 0.8 * mean + 0.2 * hidden.mean(axis=0)
        for network in models:
            network.train_on_batch(x, y)
    assert int(model.optimizer.estimations) == 5
    np.testing.assert_allclose(np.array(norm.moving_mean), mean, rtol=1e-5)
    seed = twin.layers[2].layers[1].seed_generator.state
    np.testing.assert_array_equal(
        np.array(drop.seed_generator.state), np.array(seed)
    )
