"""Keras is left alone; what changes for us changes on one model."""

import ast
import copy
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

import tfkfac
from tests.support.small import assert_same, curvature, data, kfac_of, loss, mlp

X, Y = data()
# Attributes of Keras before and after the import, and what differs.
IMPORT = """
import keras
from keras.src import backend, optimizers, saving
from keras.src.legacy.saving import legacy_h5_format, saving_utils
from keras.src.saving import saving_api, saving_lib, serialization_lib

def attributes():
    found = {}
    classes = [*keras.Model.__mro__, *keras.Sequential.__mro__]
    classes += [*keras.optimizers.LossScaleOptimizer.__mro__]
    classes += [keras.callbacks.CallbackList, *keras.layers.Dense.__mro__]
    modules = [legacy_h5_format, saving_utils, saving_api, saving_lib]
    modules += [serialization_lib, optimizers, keras.optimizers, keras.saving]
    modules += [keras.models, keras.losses, keras.metrics, backend, saving]
    for owner in (*classes, *modules):
        for name, value in vars(owner).items():
            found[f"{owner.__name__}.{name}"] = id(value)
            keep.append(value)
    tables = {"optimizers": optimizers.ALL_OBJECTS_DICT}
    for name, table in tables.items():
        found |= {f"{name}[{k}]": id(v) for k, v in table.items()}
    return found

keep = []
before = attributes()
import tfkfac
after = attributes()
print(sorted(k for k in before | after if before.get(k) != after.get(k)))
"""


def test_the_import_changes_compile_alone() -> None:
    """In a new process: no other attribute of classes, modules, tables."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        check=True,
        capture_output=True,
        text=True,
    )
    changes = ast.literal_eval(done.stdout.splitlines()[-1])
    (change,) = changes
    owner, name = change.split(".")
    assert name == "compile"
    assert owner in [base.__name__ for base in keras.Model.__mro__]


def ours_on(*owners: Any) -> set[str]:
    """Names of the attributes of ours on some objects."""
    return {
        name
        for owner in owners
        for name, value in vars(owner).items()
        if "tfkfac" in f"{name} {getattr(value, '__dict__', '')}"
    }


def test_a_model_is_left_as_it_was() -> None:
    """With another optimizer, before and after one of ours."""
    model = mlp()
    model.compile("sgd", loss(), run_eagerly=True)
    model.fit(X, Y, verbose=0)
    assert not ours_on(model, model.optimizer)
    ours = tfkfac.KFAC()
    model.compile(ours, loss(), run_eagerly=True)
    model.fit(X, Y, verbose=0)
    changed = {"fit", "train_on_batch", "get_state_tree", "set_state_tree"}
    assert changed <= ours_on(model)
    assert "set_weights" in ours_on(ours)
    model.compile("adam", loss(), run_eagerly=True)
    model.fit(X, Y, verbose=0)
    assert not ours_on(model, model.optimizer)
    assert "set_weights" not in vars(ours)


def test_a_refused_optimizer_leaves_nothing() -> None:
    model, other, taken = mlp(), mlp(), tfkfac.KFAC()
    model.compile(tfkfac.KFAC(), loss())
    other.compile(taken, loss())
    with pytest.raises(ValueError, match="already belongs to model"):
        model.compile(taken, loss())
    assert "fit" not in ours_on(model)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_model_of_its_own(way: Any) -> None:
    """By pickling, as Keras does both: it trains and is supervised."""
    model = mlp()
    model.compile(tfkfac.KFAC(max_skipped_steps=1), loss(), run_eagerly=True)
    model.fit(X, Y, verbose=0)
    other = way(model)
    assert vars(other)["fit"] is not vars(model)["fit"]
    assert_same(curvature(kfac_of(other)), curvature(kfac_of(model)))
    for one in (other, model):
        with pytest.raises(FloatingPointError, match="1 steps in a row"):
            one.train_on_batch(X * np.nan, Y)


def test_a_loop_without_fit_keeps_its_methods() -> None:
    """`attach` alone changes nothing of `fit`."""
    model = mlp()
    tfkfac.KFAC().attach(model)
    assert "fit" not in vars(model)
