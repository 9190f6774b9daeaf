"""What compat relies on in checkpoints, and what a type checker is told."""

import ast
import inspect
import pathlib
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat import optimizers
from tfkfac.compat.optimizers import KerasOptimizer
from tfkfac.compat.variables import Tracked


class Part(Tracked):
    def __init__(self, value: float) -> None:
        super().__init__(name="part")
        self.alone = tf.Variable(value)
        self.listed = [tf.Variable(value), tf.Variable(value)]


class Holder(keras.optimizers.SGD):
    """As our optimizers hold their states: a tuple, set after `__init__`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.parts: tuple[Any, ...] = ()
        self.parts = (Part(value), Part(value))


@contract(
    "compat.variables.Tracked",
    "A checkpoint of an optimizer follows tuples of modules to variables.",
)
def test_checkpoints_follow_modules(tmp_path: pathlib.Path) -> None:
    path = tf.train.Checkpoint(optimizer=Holder(3.0)).save(tmp_path / "saved")
    other = Holder(0.0)
    tf.train.Checkpoint(optimizer=other).restore(path)
    for part in other.parts:
        assert [float(v) for v in (part.alone, *part.listed)] == [3.0] * 3


def declared() -> list[str]:
    """Methods of the stand-in that a type checker sees."""
    tree = ast.parse(inspect.getsource(optimizers))
    (stub,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "KerasOptimizer"
    ]
    return [f.name for f in stub.body if isinstance(f, ast.FunctionDef)]


def test_the_class_is_keras_own() -> None:
    assert KerasOptimizer is keras.optimizers.Optimizer
    assert {"__init__", "build"} <= set(declared())


@pytest.mark.parametrize("name", declared())
def test_what_is_declared_exists(name: str) -> None:
    method = getattr(keras.optimizers.Optimizer, name)
    with contract(
        "compat.optimizers.KerasOptimizer", f"An optimizer has `{name}`."
    ):
        assert callable(method)
