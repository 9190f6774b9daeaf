"""Files and state trees of Keras: what is not only to go on from there.

That training goes on is in `integration/test_same_runs.py`.
"""

import pickle
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.saved_models import Subclassed, compiled, train
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
    unbuilt_sequential,
)
from tfkfac.saving import store


def with_optimizer(optimizer: Any, make: Callable[[], Any] = mlp) -> Any:
    model = make()
    if optimizer is not None:
        model.compile(optimizer, loss(), run_eagerly=True)
    model.build((None, FEATURES))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: with_optimizer(None),
    "sgd": lambda: with_optimizer("sgd"),
    "adam": lambda: with_optimizer("adam"),
    "kfac": lambda: with_optimizer(tfkfac.KFAC()),
    "kfac, not built": lambda: with_optimizer(
        tfkfac.KFAC(), unbuilt_sequential
    ),
}


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("plain", "kfac"),
        ("adam", "kfac"),
        ("kfac", "kfac, not built"),
        ("kfac", "plain"),
        ("kfac", "sgd"),
        ("kfac", "adam"),
    ],
)
def test_weights_are_anybodys(source: str, target: str, tmp_path: Path) -> None:
    """A warning as of Keras' optimizers, or an error that says what it is."""
    saved, model = MODELS[source](), MODELS[target]()
    if source != "plain":
        train(saved, 0, 1)
    saved.save_weights(tmp_path / "some.weights.h5")
    if target == "kfac":
        train(model, 0, 2)
        before = curvature(kfac_of(model))
    try:
        model.load_weights(tmp_path / "some.weights.h5")
    except ValueError as error:
        assert "'kfac'" in str(error) and target.startswith("kfac")
        return
    for got, want in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    if target == "kfac":
        assert_same(curvature(kfac_of(model)), before)


# --------------------------------- what Keras does not ask optimizers for
def test_state_tree_of_tensors() -> None:
    model = compiled_mlp(eager=True)
    train(model, 0, 2)
    tree = model.get_state_tree()
    before = everything(model)
    assert all(tf.is_tensor(x) for x in keras.tree.flatten(tree))
    train(model, 2, 3)
    # TensorFlow's variables in a tree go on with the training.
    own = tree["optimizer_variables"]["curvature"]
    kept = {name: np.array(x) for name, x in own.items()}
    assert not same(curvature(kfac_of(model)), kept)
    model.set_state_tree({"optimizer_variables": {"curvature": own}})
    assert_same(curvature(kfac_of(model)), kept)
    assert not same(everything(model), before)


def test_legacy_file_in_a_loss_scale_optimizer(tmp_path: Path) -> None:
    scaler = keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())
    model = with_optimizer(scaler)
    train(model, 0, 2)
    model.save(tmp_path / "model.h5")
    copy = keras.models.load_model(tmp_path / "model.h5")
    assert_same(curvature(kfac_of(copy)), curvature(kfac_of(model)))
    assert any(v.any() for v in curvature(kfac_of(copy)).values())


def save_checkpoint(model: Any, path: Path) -> str:
    checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
    return str(checkpoint.save(str(path)))


# How to save a model, and to load the file or its copy.
FILES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ".keras": (
        lambda model, path: model.save(path),
        lambda model, path, _: keras.models.load_model(path),
    ),
    ".weights.h5": (
        lambda model, path: model.save_weights(path),
        lambda model, path, _: model.load_weights(path),
    ),
    "state tree": (
        lambda model, path: model.get_state_tree("numpy_array"),
        lambda model, path, saved: model.set_state_tree(saved),
    ),
    "checkpoint": (
        save_checkpoint,
        lambda model, path, saved: tf.train.Checkpoint(
            optimizer=model.optimizer
        ).restore(saved),
    ),
    ".h5": (
        lambda model, path: model.save(path),
        lambda model, path, _: keras.models.load_model(path),
    ),
}
LATER = "'kfac' was written by format 2, this version of tfkfac reads format 1"


@pytest.mark.parametrize("kind", FILES)
def test_a_later_format_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error; of a `.h5` file Keras makes a warning."""
    model = compiled_mlp(eager=True)
    train(model, 0, 1)
    before = curvature(kfac_of(model))
    save, load = FILES[kind]
    path = tmp_path / f"model{kind.replace(' ', '')}"
    with monkeypatch.context() as patch:
        patch.setattr(store, "FORMAT", 2)
        saved = save(model, path)
    if kind == ".h5":
        with pytest.warns(UserWarning, match=LATER):
            load(model, path, saved)
    else:
        with pytest.raises(ValueError, match=LATER):
            load(model, path, saved)
    assert_same(curvature(kfac_of(model)), before)


def test_saved_without_curvature(tmp_path: Path) -> None:
    """By another optimizer: said, not an error."""
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


@pytest.mark.parametrize(
    "way", [deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_of_a_new_optimizer(way: Callable[[Any], Any]) -> None:
    """There is nothing to be found in them, and nothing to be said."""
    optimizer = tfkfac.KFAC(damping=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert way(optimizer).damping == 0.5


def test_other_optimizers_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.h5"
    model = MODELS["adam"]()
    train(model, 0, 1)
    model.save(file)
    with h5py.File(file, "r") as opened:
        assert "curvature" not in opened["optimizer_weights"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = keras.models.load_model(file)
        tree = model.get_state_tree()
        assert "curvature" not in tree["optimizer_variables"]
        copy.set_state_tree(tree)


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

    MODELS["kfac, not built"]().save(tmp_path / "late.keras")
    copy = keras.models.load_model(tmp_path / "late.keras")
    train(copy, 0, 1)
    assert int(kfac_of(copy).factor_updates) == 1
    assert kfac_of(copy).factors()["logits"]["A"].any()


# ---------------------------------------------------------- random layers
def random_layers(count: int = 4) -> Any:
    """Nested, with and without a user's seed, and in a recurrent cell."""
    nested = keras.Sequential([layers.GaussianNoise(0.5), layers.Dense(6)])
    some = [
        layers.Dropout(0.5, seed=-3),
        nested,
        layers.Reshape((2, 3)),
        layers.LSTM(3, dropout=0.5),
        layers.Dropout(0.5, name="last"),
    ]
    shape = keras.Input((FEATURES,))
    kept = some if count == 4 else some[:-1]
    model = keras.Sequential([shape, *kept, layers.Dense(CLASSES)])
    return model


def by_keras_file(model: Any, path: Path) -> Any:
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


def by_legacy_file(model: Any, path: Path) -> Any:
    model.save(path / "model.h5")
    return keras.models.load_model(path / "model.h5")


def fresh(optimizer: Any) -> Any:
    """Another model of the same layers, with other seeds."""
    keras.utils.set_random_seed(1)
    model = random_layers()
    model.compile(optimizer, loss(), run_eagerly=True)
    return model


def by_weights_file(model: Any, path: Path) -> Any:
    model.save_weights(path / "model.weights.h5")
    copy = fresh(type(model.optimizer)())
    copy.load_weights(path / "model.weights.h5")
    return copy


def by_checkpoint(model: Any, path: Path) -> Any:
    tf.train.Checkpoint(model=model).write(str(path / "checkpoint"))
    copy = fresh(type(model.optimizer)())
    tf.train.Checkpoint(model=copy).read(str(path / "checkpoint"))
    return copy


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        (by_keras_file, tfkfac.KFAC),
        (by_legacy_file, tfkfac.KFAC),
        (by_weights_file, tfkfac.KFAC),
        (by_checkpoint, tfkfac.KFAC),
        (by_weights_file, tfkfac.FOSI),
    ],
)
def test_random_layers_go_on(way: Any, optimizer: Any, tmp_path: Path) -> None:
    """The draws of Keras' generators follow from their states alone."""
    keras.utils.set_random_seed(0)
    model = random_layers()
    model.compile(optimizer(), loss(), run_eagerly=True)
    train(model, 0, 2)
    copy = way(model, tmp_path)
    seeds = [
        [np.array(v) for v in one.variables if "seed_generator" in v.path]
        for one in (model, copy)
    ]
    assert [seed[1] for seed in seeds[0]] == [2] * 4  # two steps
    np.testing.assert_array_equal(*seeds)
    losses = [one.train_on_batch(*data(seed=5)) for one in (model, copy)]
    assert losses[0] == losses[1]


def test_random_layers_of_another_model(tmp_path: Path) -> None:
    """They keep their states, and it is said where one is saved for them."""
    models = [mlp(), random_layers(), random_layers(3)]
    for model in models:
        model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
        train(model, 0, 1)
    plain, four, three = models
    store: dict[str, Any] = {}
    plain.optimizer.save_own_variables(store)
    assert not [key for key in store if "seed" in key]
    four.save_weights(tmp_path / "four.weights.h5")
    before = [np.array(v) for v in three.variables if "seed_gen" in v.path]
    with pytest.warns(UserWarning, match="does not use .*4 seed generators"):
        three.load_weights(tmp_path / "four.weights.h5")
    after = [np.array(v) for v in three.variables if "seed_gen" in v.path]
    np.testing.assert_array_equal(after, before)


# ------------------------------------------------------------- SavedModels
def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (mlp, tfkfac.KFAC),
        (mlp, tfkfac.FOSI),
        (mlp, tfkfac.GaussNewton),
        pytest.param(mlp, scaled, marks=pytest.mark.slow),
        pytest.param(Subclassed, tfkfac.KFAC, marks=pytest.mark.slow),
    ],
)
def test_saved_model(make: Any, optimizer: Any, tmp_path: Path) -> None:
    """It serves what the model predicts, and training goes on."""
    x, y = data()
    model = make()
    eager = (make, optimizer) != (mlp, tfkfac.KFAC)  # one trace is enough
    model.compile(optimizer(), loss(), run_eagerly=eager)
    model.fit(x, y, verbose=0)
    want = model.predict_on_batch(x)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    served = tf.saved_model.load(str(tmp_path / "saved"))
    signature = served.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    (got,) = signature(**{name: tf.constant(x)}).values()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    if not eager:
        model.export(str(tmp_path / "exported"), verbose=False)
        exported = tf.saved_model.load(str(tmp_path / "exported"))
        np.testing.assert_allclose(exported.serve(x), want, rtol=0, atol=1e-6)
    model.fit(x, y, verbose=0)
    after = model.predict_on_batch(x)
    assert np.isfinite(after).all() and not np.array_equal(after, want)
