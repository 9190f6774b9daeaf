"""The public docstrings are an API reference: they name every argument."""

import ast
import inspect
import pathlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tfkfac

PACKAGE = pathlib.Path(tfkfac.__file__).parent
NOT_FOR_USERS = {"self", "cls"}
MODULES = [
    value
    for name in tfkfac.__all__
    if inspect.ismodule(value := getattr(tfkfac, name))
]


def names_of(module: types.ModuleType) -> list[tuple[str, Any]]:
    """Its public classes and functions."""
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
    """The docstring; of a class, those of the classes below it as well."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    ours = (c for c in value.__mro__ if c.__module__.startswith("tfkfac"))
    return "\n".join(inspect.cleandoc(vars(c)["__doc__"] or "") for c in ours)


def arguments(value: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(value).parameters} - NOT_FOR_USERS


def described(text: str) -> set[str]:
    """Names with an entry under a heading, as `Args:`."""
    return set(re.findall(r"^ {4,}\**(\w+): ", text, re.MULTILINE))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_described(name: str) -> None:
    value = PUBLIC[name]
    text = documented(value)
    assert text
    assert arguments(value) <= described(text)


def own_members(owner: type) -> Iterator[str]:
    """Its own public methods and properties."""
    for name, value in vars(owner).items():
        kinds = (property, staticmethod, classmethod, types.FunctionType)
        if not name.startswith("_") and isinstance(value, kinds):
            yield name


CLASSES = [name for name in PUBLIC if inspect.isclass(PUBLIC[name])]


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_says_what_it_does(name: str) -> None:
    """So does an overriding one, by itself or by that it overrides."""
    owner = PUBLIC[name]
    for member in own_members(owner):
        assert inspect.getdoc(getattr(owner, member)), member


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CLASSES
        if name.rpartition(".")[0] in ("tfkfac", "tfkfac.callbacks")
    ],
)
def test_every_argument_of_a_method_is_described(name: str) -> None:
    """Of the classes that users have; blocks' are for those who add some."""
    owner = PUBLIC[name]
    for member in own_members(owner):
        value = getattr(owner, member)
        text = inspect.getdoc(value) or ""
        if callable(value):
            assert arguments(value) <= described(text), member


def test_first_lines_name_the_thing() -> None:
    """A relative clause (`What ...`) names nothing that one could search.

    Private helpers have a sentence, and no list of their arguments.
    """
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
