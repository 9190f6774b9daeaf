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
