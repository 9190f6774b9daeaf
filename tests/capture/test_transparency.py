"""Taps change nothing of the model, and go when they must."""

import copy
from pathlib import Path
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
    assert_same,
    compiled_mlp,
    data,
    everything,
    is_tapped,
    kfac_of,
    loss,
    mlp,
)

X, Y = data()
STEPS = 3


def test_compile_changes_nothing_of_the_model() -> None:
    """Config, weights, outputs, clones, copies and exports."""
    model = mlp()
    config = model.get_config()
    names = [v.path for v in model.weights]
    want = model.predict(X, verbose=0)
    model.compile(tfkfac.KFAC(), loss())
    assert model.get_config() == config
    np.testing.assert_array_equal(model.predict(X, verbose=0), want)
    model.train_on_batch(X, Y)
    assert model.get_config() == config
    assert [v.path for v in model.weights] == names
    clone = keras.models.clone_model(model)
    assert clone.get_config() == config
    # Keras compiles the clone of a compiled model, with a new optimizer.
    assert kfac_of(clone) is not kfac_of(model)
    before = everything(model)
    clone.train_on_batch(X, Y)
    assert_same(everything(model), before)


def test_deepcopy_trains_on_by_itself() -> None:
    model = compiled_mlp(eager=True)
    model.train_on_batch(X, Y)
    before = everything(model)
    twin = copy.deepcopy(model)
    assert kfac_of(twin) is not kfac_of(model)
    twin.train_on_batch(X, Y)
    assert_same(everything(model), before)
    model.train_on_batch(X, Y)
    assert_same(everything(twin), everything(model))


def test_export_is_untouched(tmp_path: Path) -> None:
    model = compiled_mlp()
    model.train_on_batch(X, Y)
    model.export(tmp_path / "model", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "model"))
    want = model.predict(X, verbose=0)
    np.testing.assert_allclose(exported.serve(X), want, rtol=1e-6, atol=1e-6)


def test_load_model_is_bound_without_custom_objects(tmp_path: Path) -> None:
    """`load_model` compiles, so the loaded model trains at once."""
    model = compiled_mlp(solver="eigen", damping=0.3, eager=True)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    optimizer = kfac_of(loaded)
    assert (optimizer.solver, optimizer.damping) == ("eigen", 0.3)
    assert is_tapped(loaded)
    loaded.train_on_batch(X, Y)
    assert int(optimizer.factor_updates) == 2


def test_activation_is_itself_after_a_call() -> None:
    """Also when the activation, or the layer, raises."""
    broken = False

    def activation(x: Any) -> Any:
        if broken:
            raise RuntimeError("broken")
        return tf.tanh(x)

    layer = layers.Dense(CLASSES, activation=activation, name="block")
    model = keras.Sequential([keras.Input((FEATURES,)), layer])
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert layer.activation is activation
    broken = True
    with pytest.raises(RuntimeError, match="broken"):
        model.train_on_batch(X, Y)
    assert layer.activation is activation
    broken = False
    model.train_on_batch(X, Y)
    assert int(kfac_of(model).factor_updates) == 2


def test_call_overridden_on_the_instance_comes_back() -> None:
    """Ours goes over somebody else's `call`, and leaves it in place."""
    model = mlp()
    layer = model.layers[0]
    original, calls = layer.call, []

    def call(x: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(x, **kwargs)

    object.__setattr__(layer, "call", call)
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert calls == [1]
    model.compile("sgd", loss())
    assert layer.call is call


def test_compute_loss_of_the_instance_comes_back() -> None:
    model = mlp()

    def compute_loss(**arguments: Any) -> Any:
        return tf.reduce_mean(tf.square(arguments["y_pred"]))

    object.__setattr__(model, "compute_loss", compute_loss)
    model.compile(tfkfac.KFAC(), loss())
    model.compile("sgd", loss())
    assert model.compute_loss is compute_loss


@pytest.mark.parametrize(
    "order",
    [
        "input first",
        "flag first",
    ],
)
def test_input_as_a_keyword(order: str) -> None:
    class Keywords(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layers.BatchNormalization(name="norm")
            self.logits = layers.Dense(CLASSES, name="logits")

        def call(self, x: Any, training: bool = False) -> Any:
            if order == "input first":
                x = self.norm(inputs=x, training=training)
            else:
                x = self.norm(training=training, inputs=x)
            return self.logits(inputs=x)

    model = Keywords()
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    blocks = kfac_of(model).factors()
    x = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-3)
    a = append_one(x)
    assert_close(blocks["logits"]["A"], a.T @ a / ROWS, 1e-4, "A")


def test_several_inputs_and_outputs() -> None:
    """Dictionaries, losses and sample weights per output, in a dataset."""
    keras.utils.set_random_seed(0)
    one = keras.Input((FEATURES,), name="one")
    two = keras.Input((2,), name="two")
    x = layers.Concatenate()([one, two])
    x = layers.Dense(5, activation="tanh", name="trunk")(x)
    outputs = {
        "label": layers.Dense(CLASSES, name="label")(x),
        "value": layers.Dense(1, name="value")(x),
    }
    model = keras.Model({"one": one, "two": two}, outputs)
    model.compile(
        tfkfac.KFAC(), {"label": loss(), "value": "mse"}, run_eagerly=True
    )
    inputs = {"one": X, "two": X[:, :2]}
    targets = {"label": Y, "value": X[:, :1]}
    weights = {"label": np.ones(ROWS), "value": np.zeros(ROWS)}
    batches = tf.data.Dataset.from_tensors((inputs, targets, weights))
    model.fit(batches, shuffle=False, verbose=0)
    blocks = kfac_of(model).factors()
    assert set(blocks) == {"trunk", "label", "value"}
    assert blocks["label"]["G"].any()
    assert not blocks["value"]["G"].any()
    a = append_one(np.concatenate([X, X[:, :2]], axis=1))
    assert_close(blocks["trunk"]["A"], a.T @ a / ROWS, 1e-5, "A")
