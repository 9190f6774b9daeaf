"""Training resumes exactly: Keras files, checkpoints, backups, mismatches."""

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.reference import eigen_solve, inverse_solve
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
    same,
)

X, Y = data()


# -------------------------------------------------------------------- models
def functional() -> Any:
    """Two branches, with layers of every kind of state."""
    inputs = keras.Input((FEATURES,))
    left = layers.Dense(4, activation="tanh", name="left")(inputs)
    right = layers.Reshape((FEATURES, 1))(inputs)
    right = layers.Conv1D(4, 2, groups=1, name="right")(right)
    right = layers.BatchNormalization(name="norm")(right)
    right = layers.GlobalAveragePooling1D()(right)
    both = layers.Add()([left, right])
    outputs = layers.Dense(CLASSES, name="logits")(both)
    return keras.Model(inputs, outputs)


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    """Its layers get new automatic names in each copy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = layers.Dense(4, activation="tanh")
        self.second = layers.Dense(4, activation="tanh")
        self.third = layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.third(self.second(self.first(x)))


def nested() -> Any:
    """Layers of one name in containers of one kind."""

    def part() -> Any:
        return keras.Sequential(
            [layers.Dense(FEATURES, activation="tanh", name="dense")]
        )

    inputs = keras.Input((FEATURES,))
    x = part()(part()(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES, name="dense")(x))


MODELS: dict[str, Callable[[], Any]] = {
    "sequential": mlp,
    "functional": functional,
    "subclassed": Subclassed,
    "nested": nested,
}
CASES = [
    ("sequential", "inverse", "sgd"),
    ("functional", "eigen", "adam"),
    ("subclassed", "inverse", "adam"),
    ("nested", "eigen", "sgd"),
]
INNER: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "plain": lambda: keras.optimizers.SGD(0.05),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.5),
}


def compiled(kind: str, inner: str = "sgd", **kwargs: Any) -> Any:
    """Clocks of 2 and 3 steps, so that step 5 is between updates."""
    kwargs.setdefault("factor_update_interval", 2)
    kwargs.setdefault("inverse_update_interval", 3)
    keras.utils.set_random_seed(0)
    model = MODELS[kind]()
    optimizer = tfkfac.KFAC(INNER[inner](), **kwargs)
    model.compile(optimizer, loss(), run_eagerly=True)
    return model


def train(model: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        model.train_on_batch(*data(seed=step))


def assert_resumes(model: Any, copy: Any) -> None:
    """Equal now, and after steps of all kinds; and they do something."""
    before = everything(model)
    assert_same(everything(copy), before)
    for one in (model, copy):
        train(one, 5, 9)
    assert_same(everything(copy), everything(model))
    assert not same(everything(model), before)


# --------------------------------------------------------------- Keras' files
@pytest.mark.parametrize(("kind", "solver", "inner"), CASES)
def test_keras_file(kind: str, solver: str, inner: str, tmp_path: Path) -> None:
    """Bitwise, in the middle of both intervals."""
    model = compiled(kind, inner, solver=solver)
    train(model, 0, 5)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    assert kfac_of(copy) is not kfac_of(model)
    assert int(kfac_of(copy).factor_updates) == 3
    assert int(kfac_of(copy).inverse_updates) == 2
    assert_resumes(model, copy)


def test_keras_file_after_fit(tmp_path: Path) -> None:
    """The traced step, with the default schedule."""
    model = compiled_mlp("adam")
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, copy):
        one.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_same(everything(copy), everything(model))
    assert int(kfac_of(copy).iterations) == 16


@pytest.mark.parametrize("kind", ["subclassed", "nested"])
def test_weights_file(kind: str, tmp_path: Path) -> None:
    """HDF5, into a model that was compiled and trained otherwise."""
    model = compiled(kind, "adam")
    train(model, 0, 5)
    model.save_weights(tmp_path / "model.weights.h5")
    copy = compiled(kind, "adam")
    train(copy, 20, 22)
    copy.load_weights(tmp_path / "model.weights.h5")
    assert_resumes(model, copy)


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
def test_state_tree() -> None:
    """As `keras.callbacks.OrbaxCheckpoint` saves, with numbers for scalars."""
    model = compiled("functional", "adam", solver="eigen")
    train(model, 0, 5)
    tree = keras.tree.map_structure(
        lambda x: x.item() if x.ndim == 0 else x.copy(),
        model.get_state_tree("numpy_array"),
    )
    # With the names of the inner optimizer, by which Keras finds its variables.
    copy = keras.models.clone_model(model)
    train(copy, 100, 101)
    copy.set_state_tree(tree)
    assert_resumes(model, copy)


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


@pytest.mark.parametrize(
    "arguments",
    [
        {"solver": "eigen"},
        {"factor_dtype": "bfloat16", "inverse_dtype": "float16"},
    ],
    ids=["eigen", "half"],
)
def test_legacy_file(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Models in Keras' old format."""
    file = tmp_path / "model.h5"
    model = compiled("sequential", "adam", **arguments)
    train(model, 0, 5)
    model.save(file)
    copy = keras.models.load_model(file)
    copy.run_eagerly = True
    assert_resumes(model, copy)
    keras.models.load_model(file, compile=False)


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
        del opened["curvature"]
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
        assert "curvature" not in opened
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decompositions_in_half_precision(dtype: str, tmp_path: Path) -> None:
    model = compiled("functional", solver="eigen", inverse_dtype=dtype)
    train(model, 0, 5)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    assert_resumes(model, copy)


@pytest.mark.parametrize("name", ["mixed_float16", "float64"])
def test_other_precisions(name: str, tmp_path: Path) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        model = compiled("sequential")
        train(model, 0, 5)
        model.save(tmp_path / "model.keras")
        copy = keras.models.load_model(tmp_path / "model.keras")
        assert type(copy.optimizer) is type(model.optimizer)
        assert_resumes(model, copy)
    finally:
        keras.config.set_dtype_policy(before)


# --------------------------------------------------------- backup, checkpoint
def test_backup_and_restore(tmp_path: Path) -> None:
    """Killed in the third epoch, started again: the run nobody killed."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    def run(*callbacks: Any) -> Any:
        model = compiled("sequential", "adam")
        model.fit(
            X,
            Y,
            batch_size=4,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return model

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(keras.callbacks.BackupAndRestore(tmp_path / "backup"), Stop())
    again = run(keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    assert int(kfac_of(again).iterations) == 16
    assert_same(everything(again), everything(whole))


@pytest.mark.parametrize(
    ("kind", "solver"), [("functional", "inverse"), ("nested", "eigen")]
)
def test_checkpoint(kind: str, solver: str, tmp_path: Path) -> None:
    """Everything has a place in `tf.train.Checkpoint`."""
    model = compiled(kind, "adam", solver=solver)
    train(model, 0, 5)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(str(tmp_path / "checkpoint"))
    copy = compiled(kind, "adam", solver=solver)
    train(copy, 20, 22)
    fresh = tf.train.Checkpoint(model=copy, optimizer=copy.optimizer)
    status = fresh.restore(path)
    status.assert_existing_objects_matched()
    status.assert_consumed()
    assert_resumes(model, copy)


def test_checkpoint_restored_before_the_first_step(tmp_path: Path) -> None:
    """The usual order of a custom loop: attach, restore, train."""
    runs = []
    for restored in (False, True):
        model = mlp()
        optimizer = tfkfac.KFAC(factor_update_interval=3).attach(model)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if restored:
            saved.restore(str(tmp_path / "checkpoint-1"))
        for step in range(2 * restored, 4):
            x, y = data(seed=step)
            gradients = gradients_of(model, x, y)
            optimizer.apply(gradients, model.trainable_variables)
            if step == 1:
                saved.save(str(tmp_path / "checkpoint"))
        weights = {str(i): w for i, w in enumerate(model.get_weights())}
        runs.append({**weights, **curvature(optimizer)})
    assert_same(runs[1], runs[0])


def test_checkpoints_have_what_files_have() -> None:
    """And not one worker's variables, which are of no use to another."""
    model = compiled("sequential")
    train(model, 0, 5)
    kept = kfac_of(model)._saved_state
    store = curvature(kfac_of(model))
    assert {k.split(":")[0] for k in store} == {"state", "inverse"}
    with np.load(io.BytesIO(kept.serialize())) as file:
        assert_same(dict(file), store)


# ------------------------------------------------------------------ mismatch
def renamed(
    state: dict[str, Any], change: Callable[[str], str]
) -> dict[str, Any]:
    """The state with other layer paths."""
    return {
        ":".join([*key.split(":")[:2], change(key.split(":", 2)[2])]): value
        for key, value in state.items()
    }


def test_other_layers() -> None:
    """The error lists what is only here and only there."""
    model = compiled_mlp()
    state = renamed(
        curvature(kfac_of(model)), lambda path: path.replace("hidden", "first")
    )
    with pytest.raises(ValueError, match=r"'kfac'.*'first'.*'hidden'"):
        kfac_of(model).load_own_variables(state)


@pytest.mark.parametrize("layer", ["hidden", "logits"])
def test_missing_layer(layer: str) -> None:
    model = compiled_mlp()
    state = curvature(kfac_of(model))
    state = {k: v for k, v in state.items() if not k.endswith(layer)}
    with pytest.raises(ValueError, match=rf"Only in the model: \['{layer}'"):
        kfac_of(model).load_own_variables(state)


def test_one_layer_too_many() -> None:
    deep = keras.Sequential([*mlp().layers, layers.Dense(CLASSES, name="more")])
    deep.build((None, FEATURES))
    deep.compile(tfkfac.KFAC(), loss())
    with pytest.raises(ValueError, match=r"Only in the file: \['more'\]"):
        kfac_of(compiled_mlp()).load_own_variables(curvature(kfac_of(deep)))


def test_other_shapes() -> None:
    wide = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(9, name="hidden"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )
    wide.compile(tfkfac.KFAC(), loss())
    with pytest.raises(ValueError, match=r"layer 'hidden'.*\(5, 5\).*\(9, 9\)"):
        kfac_of(compiled_mlp()).load_own_variables(curvature(kfac_of(wide)))


@pytest.mark.parametrize(
    ("saved", "loaded"), [("eigen", "inverse"), ("inverse", "eigen")]
)
def test_other_solver(saved: str, loaded: str, tmp_path: Path) -> None:
    """Factors stay; the next step decomposes them, whatever the interval."""
    arguments: Any = {"kl_clip": None, "factor_update_interval": 3}
    arguments |= {"inverse_update_interval": 3, "damping": 0.1}
    model = compiled("sequential", "plain", solver=saved, **arguments)
    train(model, 0, 4)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled("sequential", "plain", solver=loaded, **arguments)
    train(other, 0, 1)
    words = rf"'kfac'.*\['{saved}'\].*\['{loaded}'\] is made anew"
    with pytest.warns(UserWarning, match=words):
        other.load_weights(tmp_path / "model.weights.h5")
    factors = kfac_of(other).factors()
    for layer, kept in kfac_of(model).factors().items():
        assert_same(factors[layer], kept)
    before = other.get_weights()
    x, y = data(seed=4)
    kernel, bias, *_ = (np.array(g) for g in gradients_of(other, x, y))
    other.train_on_batch(x, y)
    solve = {"eigen": eigen_solve, "inverse": inverse_solve}[loaded]
    step = solve(np.vstack([kernel, bias]), **factors["hidden"], damping=0.1)
    moved = np.vstack(
        [b - w for b, w in zip(before, other.get_weights(), strict=True)][:2]
    )
    np.testing.assert_allclose(moved, 0.05 * step, rtol=1e-4, atol=1e-6)


def test_missing_entry() -> None:
    model = compiled_mlp()
    for part in (
        "state:factor_A",
        "inverse:solver_G",
        "state:weight",
        "state:factor_updates",
    ):
        state = curvature(kfac_of(model))
        gone = next(key for key in state if key.startswith(f"{part}:"))
        del state[gone]
        with pytest.raises(ValueError, match="does not fit layer"):
            kfac_of(model).load_own_variables(state)


def test_other_skipped_layers(tmp_path: Path) -> None:
    model = compiled_mlp(eager=True, skip_layers=["hidden"])
    model.train_on_batch(X, Y)
    state = curvature(kfac_of(model))
    with pytest.raises(ValueError, match=r"Only in the model: \['hidden'\]"):
        kfac_of(compiled_mlp()).load_own_variables(state)


def test_renamed_automatic_names() -> None:
    """`dense_7` for `dense`: matched in order, with what belongs to each."""
    model = compiled("subclassed")
    train(model, 0, 3)
    state = curvature(kfac_of(model))
    paths = list(kfac_of(model).factors())
    assert all(re.fullmatch(r"dense(_\d+)?", path) for path in paths)
    copy = compiled("subclassed")
    train(copy, 20, 22)
    assert not set(paths) & set(kfac_of(copy).factors())
    kfac_of(copy).load_own_variables(state)
    for got, want in zip(
        kfac_of(copy).factors().values(),
        kfac_of(model).factors().values(),
        strict=True,
    ):
        assert_same(got, want)


def test_equal_names_win_over_the_order() -> None:
    """Layers of given names are found wherever they stand in the file."""
    model = compiled_mlp(eager=True)
    train(model, 0, 2)
    state = curvature(kfac_of(model))
    swapped = dict(reversed(state.items()))
    assert list(swapped) != list(state)
    copy = compiled_mlp()
    kfac_of(copy).load_own_variables(swapped)
    assert_same(curvature(kfac_of(copy)), state)


def test_empty_state_changes_nothing() -> None:
    model = compiled_mlp(eager=True)
    train(model, 0, 2)
    before = everything(model)
    with pytest.warns(UserWarning, match="no curvature in what is loaded"):
        kfac_of(model).load_own_variables({})
    assert_same(everything(model), before)
