"""The public docstrings are an API reference: they name every argument."""

import ast
import doctest
import inspect
import pathlib
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tfkfac.solvers import SOLVERS

PACKAGE = pathlib.Path(tfkfac.__file__).parent
NOT_FOR_USERS = {"self", "cls"}
MODULES = [
    value
    for name in tfkfac.__all__
    if inspect.ismodule(value := getattr(tfkfac, name))
]


def names_of(module: types.ModuleType) -> list[tuple[str, Any]]:
    """The public classes and functions of a module."""
    return [
        (f"{module.__name__}.{name}", value)
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name))
        or inspect.isfunction(value)
    ]


PUBLIC = dict(
    pair for module in (tfkfac, *MODULES) for pair in names_of(module)
)


def documented(value: Any) -> str:
    """The docstring; of a class, with the docstrings of its base classes."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    classes = [c for c in value.__mro__ if c.__module__.startswith("tfkfac")]
    texts = (inspect.cleandoc(vars(c)["__doc__"] or "") for c in classes)
    return "\n".join(texts)


def arguments(value: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(value).parameters} - NOT_FOR_USERS


def described(text: str) -> set[str]:
    """Names with an entry under a heading, as `Args:`."""
    return set(re.findall(r"^ {4,}\**(\w+): ", text, re.MULTILINE))


def public_members(owner: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines."""
    kinds = (property, staticmethod, classmethod, types.FunctionType)
    for name, value in vars(owner).items():
        if not name.startswith("_") and isinstance(value, kinds):
            yield name, getattr(owner, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_and_method_is_described(name: str) -> None:
    """Arguments of methods only in the classes for all users."""
    value = PUBLIC[name]
    text = documented(value)
    assert text
    assert arguments(value) <= described(text)
    for member, method in (
        public_members(value) if inspect.isclass(value) else ()
    ):
        # An overriding method may have the docstring of the overridden one.
        text = inspect.getdoc(method) or ""
        assert text, member
        is_for_all = name.rpartition(".")[0] in ("tfkfac", "tfkfac.callbacks")
        if is_for_all and callable(method):
            assert arguments(method) <= described(text), member


def examples() -> Iterator[tuple[str, str]]:
    """The code of the public docstrings, those of methods too."""
    for name, value in PUBLIC.items():
        members = public_members(value) if inspect.isclass(value) else ()
        for member, owner in (("", value), *members):
            text = inspect.getdoc(owner) or ""
            fenced = re.findall(
                r"^( *)```python\n(.*?)^\1```$", text, re.M | re.S
            )
            prompts = doctest.DocTestParser().get_examples(text)
            parts = [textwrap.dedent(code) for _, code in fenced]
            parts += ["".join(prompt.source for prompt in prompts)]
            if code := "\n".join(parts).strip():
                yield f"{name}.{member}".rstrip("."), code


EXAMPLES = dict(examples())


def test_names_for_all_users_have_an_example() -> None:
    rooms = "tfkfac", "tfkfac.callbacks", "tfkfac.curvature", "tfkfac.schedules"
    names = {name for name in PUBLIC if name.rpartition(".")[0] in rooms}
    assert names <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """With a network of one input, and its data, under the usual names.

    At most two epochs of each `fit`.
    """
    fit = keras.Model.fit

    def short(*args: Any, epochs: int = 1, **kwargs: Any) -> Any:
        return fit(*args, epochs=min(epochs, 2), **kwargs)

    monkeypatch.setattr(keras.Model, "fit", short)
    monkeypatch.chdir(tmp_path)
    x = np.linspace(-1.0, 1.0, 32, dtype="float32")[:, None]
    y = np.sin(3 * x)
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(), "mse")
    given = {
        "keras": keras,
        "np": np,
        "tf": tf,
        "tfkfac": tfkfac,
        "x": x,
        "y": y,
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(32),
        "model": model,
        "net": model,
        "optimizer": tfkfac.GaussNewton(),
    }
    floatx = keras.config.floatx()
    # A trace takes more time than the steps.
    tf.config.run_functions_eagerly(True)
    try:
        exec(EXAMPLES[name], given)
    finally:
        tf.config.run_functions_eagerly(False)
        keras.config.set_floatx(floatx)
        SOLVERS.pop("undamped", None)


def test_first_lines_name_the_thing() -> None:
    """Not a relative clause (`What ...`); private helpers have no `Args`."""
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(
                node, ast.Module | ast.FunctionDef | ast.ClassDef
            ):
                continue
            name = getattr(node, "name", "module")
            words = (ast.get_docstring(node) or "").split()
            if words and words[0] in ("What", "Whether", "How"):
                faults.append(f"{path}: {name}: {words[0]} ...")
            private = name.startswith("_") and not name.startswith("__")
            is_helper = isinstance(node, ast.FunctionDef) and private
            if is_helper and "Args:" in words:
                faults.append(f"{path}: {name}: Args")
    assert not faults, "\n".join(faults)
