"""Files, state trees and SavedModels of Keras.

`integration/test_same_runs.py` tests that training resumes from them.
"""

import pickle
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.saved_models import Subclassed, train
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    unbuilt_sequential,
)
from tfkfac.saving import store


def with_optimizer(optimizer: Any, make: Callable[[], Any] = mlp) -> Any:
    model = make()
    model.compile(optimizer, loss(), run_eagerly=True)
    model.build((None, FEATURES))
    return model


def not_built() -> Any:
    return with_optimizer(tfkfac.KFAC(step="natural"), unbuilt_sequential)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_files_of_other_optimizers(tmp_path: Path) -> None:
    """The weights are loaded; the curvature of others stays."""
    model, adam = compiled_mlp(eager=True), with_optimizer("adam")
    files = tmp_path / "kfac.weights.h5", tmp_path / "adam.weights.h5"
    for number, trained in enumerate((model, adam)):
        train(trained, number, 2)
        trained.save_weights(files[number])
    saved, before = model.get_weights(), curvature(kfac_of(model))
    model.load_weights(files[1])
    np.testing.assert_equal(model.get_weights(), adam.get_weights())
    assert_same(curvature(kfac_of(model)), before)
    for other in (adam, mlp(1), not_built()):
        other.load_weights(files[0])
        np.testing.assert_equal(other.get_weights(), saved)
    assert_same(curvature(kfac_of(other)), before)


# ----------------------------------------------------------------- file types
def test_a_later_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = compiled_mlp(eager=True), str(tmp_path / "model")
    train(model, 0, 1)
    before = curvature(kfac_of(model))
    with monkeypatch.context() as patch:
        patch.setattr(store, "FORMAT", 3)
        model.save(f"{path}.keras")
        model.save_weights(f"{path}.weights.h5")
        saved = tf.train.Checkpoint(model=model).save(path)
    words = "'kfac' was written by format 3, this version of tfkfac reads for"
    loads: list[Callable[[], Any]] = [
        lambda: keras.models.load_model(f"{path}.keras"),
        lambda: model.load_weights(f"{path}.weights.h5"),
        lambda: tf.train.Checkpoint(model=model).restore(saved),
    ]
    for load in loads:
        with pytest.raises(ValueError, match=words):
            load()
        assert_same(curvature(kfac_of(model)), before)


def natural() -> Any:
    return tfkfac.KFAC(step="natural")


def random_layers(count: int = 4) -> Any:
    """Layers with seed generators: nested, with a seed, in a cell."""
    nested = keras.Sequential([layers.GaussianNoise(0.5), layers.Dense(6)])
    hidden = [
        layers.Dropout(0.5, seed=-3),
        nested,
        layers.Reshape((2, 3)),
        layers.LSTM(3, dropout=0.5),
        layers.Dropout(0.5, name="last"),
    ]
    kept = hidden if count == 4 else hidden[:-1]
    model = keras.Sequential(
        [keras.Input((FEATURES,)), *kept, layers.Dense(CLASSES)]
    )
    model.compile(natural(), loss(), run_eagerly=True)
    return model


def test_random_layers_resume(tmp_path: Path) -> None:
    """Keras' generators continue from their saved states."""
    keras.utils.set_random_seed(0)
    model = random_layers()
    train(model, 0, 2)
    model.save_weights(tmp_path / "model.weights.h5")
    keras.utils.set_random_seed(1)  # other seeds in a new model
    copy = random_layers()
    copy.load_weights(tmp_path / "model.weights.h5")
    seeds = [
        [np.array(v) for v in each.variables if "seed_generator" in v.path]
        for each in (model, copy)
    ]
    assert [seed[1] for seed in seeds[0]] == [2] * 4  # two steps
    np.testing.assert_array_equal(*seeds)
    losses = [each.train_on_batch(*data(seed=5)) for each in (model, copy)]
    assert losses[0] == losses[1]


def test_random_layers_of_another_model(tmp_path: Path) -> None:
    """The states of other generators are not loaded, with a warning."""
    four, three = random_layers(), random_layers(3)
    for model in (four, three):
        train(model, 0, 1)
    four.save_weights(tmp_path / "four.weights.h5")
    before = [np.array(v) for v in three.variables if "seed_gen" in v.path]
    with pytest.warns(UserWarning, match="does not use .*4 seed generators"):
        three.load_weights(tmp_path / "four.weights.h5")
    after = [np.array(v) for v in three.variables if "seed_gen" in v.path]
    np.testing.assert_array_equal(after, before)


# ------------------------------------------------------------- state and files
def test_legacy_file_without_curvature(tmp_path: Path) -> None:
    """Saving warns; the optimizer of the loaded model starts again."""
    model = with_optimizer(keras.optimizers.LossScaleOptimizer(natural()))
    train(model, 0, 2)
    with pytest.warns(UserWarning, match=r"`\.h5` file does not .*'kfac'"):
        model.save(tmp_path / "model.h5")
    copy = keras.models.load_model(tmp_path / "model.h5")
    np.testing.assert_equal(copy.get_weights(), model.get_weights())
    copy.run_eagerly = True
    train(copy, 2, 3)
    assert int(kfac_of(copy).factor_updates) == 1


def test_state_tree_without_curvature() -> None:
    model = compiled_mlp(eager=True)
    train(model, 0, 1)
    model.set_state_tree(model.get_state_tree("numpy_array"))
    with pytest.raises(ValueError, match="state trees do not contain"):
        train(model, 1, 2)


@pytest.mark.parametrize(
    "way", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_a_new_optimizer(way: Callable[[Any], Any]) -> None:
    optimizer = tfkfac.KFAC(step="natural", damping=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert way(optimizer).damping == 0.5


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_saved_before_training(tmp_path: Path) -> None:
    """The copy trains as the original, whether it is built or not."""
    model = compiled_mlp(eager=True, factor_update_interval=2)
    model.save(tmp_path / "built.keras")
    copy = keras.models.load_model(tmp_path / "built.keras")
    copy.run_eagerly = True
    assert_same(everything(copy), everything(model))
    for each in (model, copy):
        train(each, 0, 2)
    assert_same(everything(copy), everything(model))

    not_built().save(tmp_path / "late.keras")
    copy = keras.models.load_model(tmp_path / "late.keras")
    copy.run_eagerly = True
    train(copy, 0, 1)
    assert int(kfac_of(copy).factor_updates) == 1
    assert kfac_of(copy).factors()["logits"]["A"].any()


def test_checkpoint_restored_before_the_first_step(tmp_path: Path) -> None:
    """The order of a custom loop: attach, restore, train."""
    runs = []
    for restored in (False, True):
        model = mlp()
        optimizer = tfkfac.KFAC(
            step="natural", factor_update_interval=3
        ).attach(model)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if restored:
            saved.restore(str(tmp_path / "checkpoint-1"))
        for step in range(2 * restored, 4):
            gradients = gradients_of(model, *data(seed=step))
            optimizer.apply(gradients, model.trainable_variables)
            if step == 1:
                saved.save(str(tmp_path / "checkpoint"))
        weights = {str(i): w for i, w in enumerate(model.get_weights())}
        runs.append({**weights, **curvature(optimizer)})
    assert_same(runs[1], runs[0])


# ------------------------------------------------------------- SavedModels
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (mlp, tfkfac.KFAC),
        (mlp, lambda: tfkfac.FOSI(num_largest=1, lanczos_steps=2)),
        (mlp, tfkfac.GaussNewton),
        pytest.param(Subclassed, tfkfac.KFAC, marks=pytest.mark.slow),
    ],
)
def test_saved_model(
    make: Any, optimizer: Any, tmp_path: Path, run_eagerly: Any
) -> None:
    """A SavedModel serves the predictions; training goes on."""
    x, y = data()
    model = make()
    eager = (make, optimizer) != (mlp, tfkfac.KFAC)  # trace once
    model.compile(optimizer(), loss(), run_eagerly=eager)
    run_eagerly(eager)
    model.fit(x, y, verbose=0)
    run_eagerly(False)
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
