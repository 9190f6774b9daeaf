"""An optimizer belongs to one model, which it must know in time."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import append_one
from tests.support.small import (
    CLASSES,
    FEATURES,
    compiled_mlp,
    data,
    gradients_of,
    is_tapped,
    kfac_of,
    loss,
    mlp,
)

X, Y = data()
STEPS = 3


def test_second_model_is_refused() -> None:
    model = compiled_mlp(eager=True)
    other = mlp()
    other.name = "other"
    with pytest.raises(ValueError, match=r"'mlp'.*model 'other'"):
        other.compile(model.optimizer, loss())
    with pytest.raises(ValueError, match="already belongs to model 'mlp'"):
        model.optimizer.attach(other)
    # The first model is none the worse.
    model.train_on_batch(X, Y)


def test_model_of_the_optimizer_is_gone() -> None:
    model = compiled_mlp()
    optimizer = model.optimizer
    del model
    gc.collect()
    with pytest.raises(ValueError, match="belongs to a deleted model"):
        mlp().compile(optimizer, loss())


def test_attach_wants_a_model() -> None:
    with pytest.raises(TypeError, match=r"Argument `model`.*Received"):
        tfkfac.KFAC().attach(layers.Dense(2))  # type: ignore[arg-type]


def test_never_attached() -> None:
    """The error says what to call, before anything has changed."""
    model = mlp()
    optimizer = tfkfac.KFAC()
    before = model.get_weights()
    gradients = gradients_of(model, X, Y)
    with pytest.raises(ValueError, match=r"`optimizer\.attach\(model\)`"):
        optimizer.apply(gradients, model.trainable_variables)
    for value, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, want)
    with pytest.raises(ValueError, match="does not know its model"):
        optimizer.summary()


@pytest.mark.parametrize("eager", [True, False])
def test_attached_too_late(eager: bool) -> None:
    """After the forward pass there is nothing left to record."""
    model = mlp()
    optimizer = tfkfac.KFAC()

    def step() -> None:
        gradients = gradients_of(model, X, Y)
        optimizer.attach(model)
        optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(ValueError, match=r"'hidden'.*after the forward pass"):
        (step if eager else tf.function(step))()


def test_two_models_share_a_trunk() -> None:
    """Each optimizer takes the records of its own model's steps."""
    keras.utils.set_random_seed(0)
    trunk = layers.Dense(4, activation="tanh", name="trunk")
    inputs = keras.Input((FEATURES,))
    shared = trunk(inputs)
    models = [
        keras.Model(inputs, layers.Dense(CLASSES, name=name)(shared))
        for name in ("left", "right")
    ]
    for model in models:
        model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    batches = [data(5, seed=1), data(9, seed=2)]
    for model, (x, y) in zip(models, batches, strict=True):
        model.train_on_batch(x, y)
    for model, (x, _) in zip(models, batches, strict=True):
        a = append_one(x.astype(np.float64))
        got = kfac_of(model).factors()["trunk"]["A"]
        assert_close(got, a.T @ a / len(x), 1e-5, "A")
    # The trunk stays tapped for the other one.
    models[0].compile("sgd", loss())
    models[1].train_on_batch(*batches[1])
    models[1].compile("sgd", loss())
    assert not is_tapped(models[0])
    assert not is_tapped(models[1])
