"""tfkfac overrides `compile` of Keras, and methods of the compiled model."""

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
# Prints the attributes of Keras that the import of tfkfac changes.
IMPORT = """
import keras
from keras.src import backend, optimizers, saving
from keras.src.legacy.saving import legacy_h5_format, saving_utils
from keras.src.saving import saving_api, saving_lib, serialization_lib

def attributes():
    values = {}
    classes = [*keras.Model.__mro__, *keras.Sequential.__mro__]
    classes += [*keras.optimizers.LossScaleOptimizer.__mro__]
    classes += [keras.callbacks.CallbackList, *keras.layers.Dense.__mro__]
    modules = [legacy_h5_format, saving_utils, saving_api, saving_lib]
    modules += [serialization_lib, optimizers, keras.optimizers, keras.saving]
    modules += [keras.models, keras.losses, keras.metrics, backend, saving]
    for owner in (*classes, *modules):
        for name, value in vars(owner).items():
            values[f"{owner.__name__}.{name}"] = id(value)
            keep.append(value)
    table = optimizers.ALL_OBJECTS_DICT
    return values | {f"optimizers[{k}]": id(v) for k, v in table.items()}

keep = []
before = attributes()
import tfkfac
after = attributes()
print(sorted(k for k in before | after if before.get(k) != after.get(k)))
"""


def test_the_import_changes_only_compile() -> None:
    """In a new process, among the attributes of classes, modules, tables."""
    output = subprocess.check_output([sys.executable, "-c", IMPORT], text=True)
    (change,) = ast.literal_eval(output.splitlines()[-1])
    owner, name = change.split(".")
    assert name == "compile"
    assert owner in [base.__name__ for base in keras.Model.__mro__]


@pytest.mark.parametrize("copy_model", [copy.copy, copy.deepcopy])
def test_a_copy_is_an_independent_model(copy_model: Any) -> None:
    """Keras copies by pickling; the copy trains and is supervised."""
    model = mlp()
    model.compile(
        tfkfac.KFAC(step="natural", max_skipped_steps=1),
        loss(),
        run_eagerly=True,
    )
    model.fit(X, Y, verbose=0)
    other = copy_model(model)
    assert vars(other)["fit"] is not vars(model)["fit"]
    assert_same(curvature(kfac_of(other)), curvature(kfac_of(model)))
    for trained in (other, model):
        with pytest.raises(FloatingPointError, match="1 steps in a row"):
            trained.train_on_batch(X * np.nan, Y)


def test_attach_does_not_override_fit() -> None:
    model = mlp()
    tfkfac.KFAC(step="natural").attach(model)
    assert "fit" not in vars(model)
