"""An optimizer belongs to one model, from `compile` or `attach` on."""

import gc
from typing import Any

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
    ROWS,
    LateBuilt,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    is_tapped,
    kfac_of,
    loss,
    mlp,
)

X, Y = data()


def train(model: Any, optimizer: Any, x: Any = X, y: Any = Y) -> None:
    """Compile the model and take one eager step."""
    model.compile(optimizer, loss(), run_eagerly=True)
    model.train_on_batch(x, y)


# ---------------------------------------------------- compile and compile again
def test_compile_again() -> None:
    """The state stays; another KFAC starts without and gets all records."""
    model, old = mlp(), tfkfac.KFAC(step="natural")
    train(model, old)
    before = everything(model)
    model.compile(old, loss(), run_eagerly=True)
    assert_same(everything(model), before)
    model.train_on_batch(X, Y)
    assert int(old.factor_updates) == 2
    before = curvature(old)
    new = tfkfac.KFAC(step="natural", solver="eigen")
    train(model, new)
    assert int(new.factor_updates) == 1
    assert all(block["G"].any() for block in new.factors().values())
    assert_same(curvature(old), before)


@pytest.mark.parametrize("case", ["trained", "not built", "deleted"])
def test_another_optimizer_removes_all_taps(case: str) -> None:
    """Taps of a deleted optimizer and overrides of `fit` are removed, too."""
    gc.freeze()  # so that garbage of other tests is not collected here
    model = LateBuilt()
    if case != "not built":
        parts = [layers.BatchNormalization(), *mlp().layers]
        model = keras.Sequential([keras.Input((FEATURES,)), *parts])
    names = [set(vars(layer)) for layer in model._flatten_layers()]
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    if case == "deleted":
        model.optimizer = None
        gc.collect()
    elif case == "trained":
        model.train_on_batch(X, Y)
        assert is_tapped(model) and "fit" in vars(model)
    train(model, "adam")
    assert not is_tapped(model) and "fit" not in vars(model)
    if case == "trained":
        now = [set(vars(layer)) for layer in model._flatten_layers()]
        assert now[1:] == names[1:]


# ------------------------------------------------------------- fine-tuning
def test_freezing_and_unfreezing_a_layer() -> None:
    """The optimizer continues with the remaining layers and their state.

    A layer that is unfrozen starts with factors of the next batch.
    """
    model, optimizer = mlp(), tfkfac.KFAC(step="natural")
    hidden, logits = model.layers
    train(model, optimizer)
    kept = optimizer.factors()["logits"]
    frozen, head = hidden.get_weights(), logits.get_weights()
    (state,) = optimizer.method.states
    state.counters.failures.assign([2, 3])
    hidden.trainable = False
    model.compile(optimizer, loss(), run_eagerly=True)
    assert optimizer.events() == {"failed decompositions of logits": 3}
    np.testing.assert_array_equal(optimizer.factors()["logits"]["A"], kept["A"])
    assert "call" not in vars(hidden)
    model.train_on_batch(X, Y)
    assert list(optimizer.factors()) == ["logits"]
    for value, want in zip(hidden.get_weights(), frozen, strict=True):
        np.testing.assert_array_equal(value, want)
    assert not np.array_equal(logits.get_weights()[0], head[0])
    hidden.trainable = True
    model.compile(optimizer, loss(), run_eagerly=True)
    assert not optimizer.factors()["hidden"]["A"].any()
    # An iteration between two updates of the schedule.
    optimizer.iterations.assign(101)
    model.train_on_batch(X, Y)
    a = append_one(X.astype(np.float64))
    assert_close(optimizer.factors()["hidden"]["A"], a.T @ a / ROWS, 1e-5)


@pytest.mark.parametrize("make", [tfkfac.KFAC, tfkfac.FOSI, tfkfac.GaussNewton])
def test_a_model_without_trainable_weights(make: Any) -> None:
    """Keras warns and evaluates the loss, as with its own optimizers."""
    model = mlp()
    model.trainable = False
    losses = []
    for optimizer in ("sgd", make()):
        model.compile(optimizer, loss())
        with pytest.warns(UserWarning, match="not have any trainable weights"):
            losses.append(model.fit(X, Y, verbose=0).history["loss"])
    assert losses[0] == losses[1]
    optimizer.summary()
    sizes = optimizer.communication_bytes().values()
    assert {size["gradients"] for size in sizes} == {0}


def test_unfreezing_a_layer_after_build() -> None:
    model, optimizer = mlp(), tfkfac.KFAC(step="natural")
    model.layers[0].trainable = False
    train(model, optimizer)
    assert list(optimizer.factors()) == ["logits"]
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match=r"hidden/kernel.*new optimizer"):
        model.compile(optimizer, loss())
    train(model, tfkfac.KFAC(step="natural"))
    assert list(kfac_of(model).factors()) == ["hidden", "logits"]


def test_freezing_the_kernel_of_a_covered_layer() -> None:
    """The inner optimizer would train the bias without its block."""
    model, optimizer = mlp(), tfkfac.KFAC(step="natural")
    train(model, optimizer)
    model.layers[1].kernel.trainable = False
    with pytest.raises(
        ValueError, match=r"\['mlp/logits/bias'\], whose.*new optimizer"
    ):
        model.compile(optimizer, loss())
    train(model, tfkfac.KFAC(step="natural"))


# ---------------------------------------------------- one model per optimizer
def test_second_model_is_refused() -> None:
    gc.freeze()  # so that garbage of other tests is not collected here
    model, other = compiled_mlp(eager=True), mlp()
    optimizer = model.optimizer
    other.name = "other"
    with pytest.raises(ValueError, match=r"'mlp'.*model 'other'"):
        other.compile(optimizer, loss())
    assert "fit" not in vars(other)
    words = r"already belongs to model 'mlp'.*model 'other'"
    with pytest.raises(ValueError, match=words):
        optimizer.attach(other)
    clone = keras.models.clone_model(model)
    with pytest.raises(ValueError, match=r"model 'mlp'.*Received: a clone"):
        clone.compile(optimizer, loss())
    # The first model still trains.
    model.train_on_batch(X, Y)
    del model
    gc.collect()
    with pytest.raises(ValueError, match="belongs to a deleted model"):
        other.compile(optimizer, loss())
    with pytest.raises(TypeError, match=r"Argument `model`.*Received"):
        tfkfac.KFAC(step="natural").attach(layers.Dense(2))  # type: ignore[arg-type]


def test_never_attached() -> None:
    """The error names the missing call; nothing changes."""
    model, optimizer = mlp(), tfkfac.KFAC(step="natural")
    before = model.get_weights()
    gradients = gradients_of(model, X, Y)
    with pytest.raises(ValueError, match=r"`optimizer\.attach\(model\)`"):
        optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_equal(model.get_weights(), before)
    for report in (optimizer.summary, optimizer.state_bytes):
        with pytest.raises(ValueError, match="does not know its model"):
            report()


@pytest.mark.parametrize("eager", [True, False])
def test_attached_too_late(eager: bool) -> None:
    """Attaching after the forward pass raises an error."""
    model = mlp()
    optimizer = tfkfac.KFAC(step="natural", only_layers="hidden")

    def step() -> None:
        gradients = gradients_of(model, X, Y)
        optimizer.attach(model)
        optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(ValueError, match=r"'hidden'.*after the forward pass"):
        (step if eager else tf.function(step))()


def test_two_models_share_a_trunk() -> None:
    """Each optimizer gets the records of its model's steps only."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    shared = layers.Dense(4, activation="tanh", name="trunk")(inputs)
    models = [
        keras.Model(inputs, layers.Dense(CLASSES, name=name)(shared))
        for name in ("left", "right")
    ]
    for model in models:
        model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    batches = [data(5, seed=1), data(9, seed=2)]
    for model, (x, y) in zip(models, batches, strict=True):
        model.train_on_batch(x, y)
    for model, (x, _) in zip(models, batches, strict=True):
        a = append_one(x.astype(np.float64))
        got = kfac_of(model).factors()["trunk"]["A"]
        assert_close(got, a.T @ a / len(x), 1e-5, "A")
    # The trunk stays tapped for the other model.
    models[0].compile("sgd", loss())
    models[1].train_on_batch(*batches[1])
    models[1].compile("sgd", loss())
    assert not is_tapped(models[0])
    assert not is_tapped(models[1])
