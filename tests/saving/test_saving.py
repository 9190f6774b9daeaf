"""Files and state trees of Keras: what is not only to go on from there.

That training goes on is in `integration/test_same_runs.py`.
"""

import warnings
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.saved_models import compiled, train
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    kfac_of,
    loss,
    mlp,
    same,
)

X, Y = data()


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_weights_of_a_plain_model(tmp_path: Path) -> None:
    """A file without an optimizer has nothing to say about it."""
    plain = mlp(seed=3)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = compiled_mlp(eager=True)
    train(model, 0, 2)
    before = curvature(kfac_of(model))
    model.load_weights(tmp_path / "plain.weights.h5")
    assert_same(curvature(kfac_of(model)), before)
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_weights_of_a_model_with_another_optimizer(tmp_path: Path) -> None:
    """A warning as of Keras' optimizers, or an error that says what it is."""
    adam = mlp(seed=3)
    adam.compile("adam", loss(), run_eagerly=True)
    adam.train_on_batch(X, Y)
    adam.save_weights(tmp_path / "adam.weights.h5")
    model = compiled_mlp(eager=True)
    try:
        model.load_weights(tmp_path / "adam.weights.h5")
    except ValueError as error:
        assert "'kfac'" in str(error)
    else:
        kernel = adam.get_weights()[0]
        np.testing.assert_array_equal(model.get_weights()[0], kernel)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_mixed_precision_file_without_the_policy(tmp_path: Path) -> None:
    """Keras then leaves its LossScaleOptimizer out, with a warning."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled_mlp(eager=True)
    finally:
        keras.config.set_dtype_policy(before)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    for got, want in zip(copy.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_weights_for_an_optimizer_that_is_not_built(tmp_path: Path) -> None:
    """It resumes, or the error says what is the matter."""
    model = compiled_mlp(eager=True)
    model.train_on_batch(X, Y)
    model.save_weights(tmp_path / "model.weights.h5")
    hidden = layers.Dense(5, activation="tanh", name="hidden")
    copy = keras.Sequential([hidden, layers.Dense(CLASSES, name="logits")])
    copy.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    copy.build((None, FEATURES))
    try:
        copy.load_weights(tmp_path / "model.weights.h5")
    except ValueError as error:
        assert "'kfac'" in str(error)
    else:
        for got, want in zip(
            copy.get_weights(), model.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(got, want)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_weights_for_a_model_with_another_optimizer(tmp_path: Path) -> None:
    """The weights of a K-FAC run are anybody's."""
    model = compiled_mlp(eager=True)
    model.train_on_batch(X, Y)
    model.save_weights(tmp_path / "kfac.weights.h5")
    for optimizer in (None, "sgd", "adam"):
        other = mlp(seed=3)
        if optimizer:
            other.compile(optimizer, loss())
        other.load_weights(tmp_path / "kfac.weights.h5")
        for got, want in zip(
            other.get_weights(), model.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(got, want)


# --------------------------------- what Keras does not ask optimizers for


def test_state_tree_of_tensors() -> None:
    model = compiled_mlp(eager=True)
    train(model, 0, 3)
    tree = model.get_state_tree()
    before = everything(model)
    assert all(tf.is_tensor(x) for x in keras.tree.flatten(tree))
    train(model, 3, 5)
    # TensorFlow's variables in a tree go on with the training.
    own = tree["optimizer_variables"]["curvature"]
    changed = curvature(kfac_of(model))
    assert not same(changed, {name: np.array(x) for name, x in own.items()})
    model.set_state_tree({"optimizer_variables": {"curvature": own}})
    assert_same(
        curvature(kfac_of(model)), {k: np.array(x) for k, x in own.items()}
    )
    assert not same(everything(model), before)


def test_legacy_file_in_a_loss_scale_optimizer(tmp_path: Path) -> None:
    model = mlp()
    scaler = keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())
    model.compile(scaler, loss(), run_eagerly=True)
    train(model, 0, 3)
    model.save(tmp_path / "model.h5")
    copy = keras.models.load_model(tmp_path / "model.h5")
    assert_same(curvature(kfac_of(copy)), curvature(kfac_of(model)))
    assert any(v.any() for v in curvature(kfac_of(copy)).values())


def test_saved_without_curvature(tmp_path: Path) -> None:
    """By another optimizer or an earlier version: said, not an error."""
    file = tmp_path / "model.h5"
    model = compiled_mlp(eager=True)
    train(model, 0, 2)
    model.save(file)
    with h5py.File(file, "a") as opened:
        weights = opened["optimizer_weights"]
        del weights["curvature"]
        names = weights.attrs["weight_names"]
        own = [name for name in names if not name.startswith("curvature")]
        weights.attrs["weight_names"] = own
    tree = model.get_state_tree()
    del tree["optimizer_variables"]["curvature"]
    with pytest.warns(UserWarning, match="'kfac' finds no curvature"):
        copy = keras.models.load_model(file)
    assert int(kfac_of(copy).factor_updates) == 0
    with pytest.warns(UserWarning, match="'kfac' finds no curvature"):
        model.set_state_tree(tree)


def test_other_optimizers_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.h5"
    model = mlp()
    model.compile("adam", loss())
    train(model, 0, 2)
    model.save(file)
    with h5py.File(file, "r") as opened:
        assert "curvature" not in opened["optimizer_weights"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = keras.models.load_model(file)
        tree = model.get_state_tree()
        assert "curvature" not in tree["optimizer_variables"]
        copy.set_state_tree(tree)


def test_other_layers_in_a_state_tree() -> None:
    """An error as in any file."""
    model, other = compiled_mlp(eager=True), compiled("functional")
    for each in (model, other):
        train(each, 0, 1)
    with pytest.raises(ValueError, match="is of other layers"):
        other.set_state_tree(model.get_state_tree())


def test_changed_hyperparameters_are_saved(tmp_path: Path) -> None:
    model = compiled_mlp(factor_update_interval=3, eager=True)
    model.optimizer.damping = 0.75
    model.optimizer.factor_update_interval = 5
    model.optimizer.learning_rate = 0.125
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert (copy.damping, copy.factor_update_interval) == (0.75, 5)
    assert float(copy.learning_rate) == 0.125


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_saved_before_training(tmp_path: Path) -> None:
    """Built or not: the copy starts where the original would."""
    model = compiled("sequential")
    model.save(tmp_path / "built.keras")
    copy = keras.models.load_model(tmp_path / "built.keras")
    assert_same(everything(copy), everything(model))
    for one in (model, copy):
        train(one, 0, 2)
    assert_same(everything(copy), everything(model))

    late = keras.Sequential([layers.Dense(CLASSES, name="logits")])
    late.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    late.build((None, FEATURES))
    late.save(tmp_path / "late.keras")
    copy = keras.models.load_model(tmp_path / "late.keras")
    copy.train_on_batch(X, Y)
    assert int(kfac_of(copy).factor_updates) == 1
    assert kfac_of(copy).factors()["logits"]["A"].any()


def test_loaded_without_compiling(tmp_path: Path) -> None:
    """A new optimizer starts anew, also one of ours."""
    model = compiled("sequential")
    train(model, 0, 3)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras", compile=False)
    copy.compile(tfkfac.KFAC(solver="eigen"), loss(), run_eagerly=True)
    train(copy, 3, 4)
    assert int(kfac_of(copy).iterations) == 1
