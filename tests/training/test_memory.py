"""Memory after the deletion of a trained model."""

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
from tensorflow.python.framework.func_graph import FuncGraph

import tfkfac


def graphs() -> "weakref.WeakSet[Any]":
    gc.collect()
    return weakref.WeakSet(
        o for o in gc.get_objects() if isinstance(o, FuncGraph)
    )


def train(optimizer: keras.optimizers.Optimizer) -> None:
    layers = [keras.Input((3,)), keras.layers.Dense(2, "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(optimizer=optimizer, loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)), rng.normal(size=(8, 2))
    model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    "make",
    [
        tfkfac.KFAC,
        pytest.param(tfkfac.FOSI, marks=pytest.mark.slow),
        pytest.param(tfkfac.GaussNewton, marks=pytest.mark.slow),
    ],
)
def test_no_graph_outlives_its_model(make: Any) -> None:
    before = graphs()
    train(make())
    assert [g.name for g in graphs() if g not in before] == []
