"""tfkfac overrides `compile` of Keras, and methods of the compiled model."""

import ast
import copy
import sys

import keras
import numpy as np
import pytest

import tfkfac
from tests.support.programs import Program
from tests.support.small import assert_same, curvature, data, kfac_of, loss, mlp
from tfkfac.callbacks import supervision

X, Y = data()


def test_the_import_changes_only_compile() -> None:
    """In the process that the processes of the tests are forked from."""
    command = [sys.executable, "-c", "import __main__; print(__main__.changes)"]
    with Program(command) as program:
        assert program.end() == 0
    (change,) = ast.literal_eval(program.text())
    owner, name = change.split(".")
    assert name == "compile"
    assert owner in [base.__name__ for base in keras.Model.__mro__]


def test_a_copy_is_an_independent_model() -> None:
    """Keras copies by pickling; each copy trains and is supervised."""
    model = mlp()
    model.compile(
        tfkfac.KFAC(step="natural", max_skipped_steps=1),
        loss(),
        run_eagerly=True,
    )
    model.fit(X, Y, verbose=0)
    copies = copy.copy(model), copy.deepcopy(model)
    for other in copies:
        assert vars(other)["fit"] is not vars(model)["fit"]
        assert_same(curvature(kfac_of(other)), curvature(kfac_of(model)))
    for trained in (*copies, model):
        with pytest.raises(FloatingPointError, match="1 steps in a row"):
            trained.train_on_batch(X * np.nan, Y)


def test_attach_does_not_override_fit() -> None:
    model = mlp()
    tfkfac.KFAC(step="natural").attach(model)
    assert "fit" not in vars(model)


class Entered(keras.callbacks.Callback):
    """A callback that the user, not `fit`, enters as a context."""

    def __enter__(self) -> None:
        raise AssertionError

    def __exit__(self, *error: object) -> None: ...


def test_fit_enters_no_callback_of_the_user() -> None:
    model = mlp()
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.fit(X, Y, verbose=0, callbacks=[Entered()])


def test_callbacks_from_their_config() -> None:
    backup = tfkfac.callbacks.ChiefBackup("folder", delete_checkpoint=False)
    logger = tfkfac.callbacks.CurvatureLogger(every=5, layers=False)
    for callback in (backup, logger):
        stored = keras.saving.serialize_keras_object(callback)
        assert stored["registered_name"].startswith("tfkfac>")
        copied = keras.saving.deserialize_keras_object(stored)
        assert type(copied) is type(callback)
        assert copied.get_config() == callback.get_config()


def test_batches_between_files() -> None:
    """Keras' callbacks count the batches of several `fit`s."""
    saver = keras.callbacks.ModelCheckpoint("x.keras", save_freq=5)
    count = 0
    for batch in [*range(7)] * 5:
        count = supervision.advance(5, count)
        assert (count == 0) == saver._should_save_on_batch(batch)
