"""The walls of the house: who may import whom, and where private names stand.

What is checked is the text of tfkfac/, and how many of its files a step runs.
"""

import ast
import collections
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfkfac

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tfkfac"
# The rooms that a room may import, from the top of the house to the ground.
MAY = {
    "callbacks": {"kfac", "fosi", "gauss_newton", "supervision", "shell",
                  "cluster", "distributed", "saving", "compat"},
    "kfac": {"shell", "training", "fisher", "curvature", "solvers",
             "blocks", "factors", "loss", "capture", "distributed", "linalg",
             "saving", "compat"},
    "fosi": {"shell", "training", "curvature", "loss", "capture",
             "distributed", "linalg", "saving", "compat"},
    "gauss_newton": {"shell", "training", "fisher", "curvature", "loss",
                     "capture", "distributed", "linalg", "saving", "compat"},
    "supervision": {"shell", "training", "cluster", "capture", "distributed",
                    "saving", "compat"},
    "shell": {"training", "loss", "capture", "distributed", "saving",
              "compat"},
    "training": {"loss", "capture", "distributed", "linalg",
                 "saving", "compat"},
    "curvature": {"loss", "capture", "linalg", "compat"},
    "fisher": {"blocks", "factors", "loss", "capture", "linalg", "compat"},
    "solvers": {"blocks", "factors", "linalg", "compat"},
    "blocks": {"capture", "factors", "linalg", "compat"},
    "factors": {"linalg", "compat"},
    "loss": {"capture", "distributed", "compat"},
    "capture": {"compat"},
    "linalg": {"compat"},
    "distributed": {"compat"},
    "cluster": {"compat"},
    "saving": {"compat"},
    "compat": set(),
}  # fmt: skip
EVERYBODY = "checks"  # a module of plain Python that every room may import
UNPROMISED = ("keras.src", "tensorflow.python", "tensorflow.compiler")
# `cls` too: a class method may use what its own class keeps to itself.
OWN = {"self", "cls"}
# What Python promises of named tuples, and of `sys`.
PROMISED = {"_asdict", "_replace", "_current_frames"}
LONGEST_MODULE = 600
LONGEST_FUNCTION = 60
MOST_MODULES = 12  # of a room
# Modules of less than so many lines that one other module alone imports.
SHORT, MOST_SHORT = 60, 5
# Files of the package that run while a step of two dense layers is traced.
STEPS: dict[str, tuple[Callable[[], Any], int]] = {
    "KFAC": (tfkfac.KFAC, 40),
    "FOSI": (
        lambda: tfkfac.FOSI("sgd", warmup_steps=1, update_interval=3),
        30,
    ),
}


def modules() -> list[pathlib.Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 50
    return found


def place(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def name_of(path: pathlib.Path) -> str:
    name = place(path).removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def imported(tree: ast.AST) -> Iterator[str]:
    """What a module imports, with the names that it takes from there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


def test_every_room_has_walls() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert rooms == set(MAY)


def test_a_room_imports_only_rooms_below_it() -> None:
    faults = []
    for path in modules():
        room = path.relative_to(PACKAGE).parts[0]
        for name in imported(ast.parse(path.read_text())):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if room not in MAY or top != "tfkfac" or other == room:
                continue
            if other != EVERYBODY and other not in MAY[room]:
                faults.append(f"{place(path)} imports {name}")
    assert not faults, "\n".join(faults)


def test_the_rooms_are_in_order() -> None:
    """Imports run downwards only, so no two rooms need each other."""
    order = list(MAY)
    for room, others in MAY.items():
        for other in others:
            above = order.index(other) <= order.index(room)
            # These two floors have rooms side by side.
            assert not above or (other, room) in {("linalg", "capture")}, (
                f"{room} may import {other}, which is not below it"
            )


def test_no_circles() -> None:
    """No module imports itself by way of others."""
    names = {name_of(path) for path in modules()}
    graph = {
        name_of(path): {
            target
            for name in imported(ast.parse(path.read_text()))
            for target in (name, name.rpartition(".")[0])
            if target in names and target != name_of(path)
        }
        for path in modules()
    }
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_unpromised_modules_stay_in_compat() -> None:
    faults = [
        f"{place(path)} imports {name}"
        for path in modules()
        if path.parent.name != "compat"
        for name in imported(ast.parse(path.read_text()))
        if name.startswith(UNPROMISED) or name.startswith("unittest")
    ]
    assert not faults, "\n".join(faults)


def private_names(tree: ast.AST) -> set[str]:
    """Underscored names that a module gives to something of its own."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(
            node.target, ast.Name
        ):
            own.add(node.target.id)
    return own


def test_underscored_names_of_others_stay_in_compat() -> None:
    """`x._y` is ours only if this module has made a `_y`."""
    faults = []
    for path in modules():
        if path.parent.name == "compat":
            continue
        tree = ast.parse(path.read_text())
        own = private_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            private = node.attr.startswith("_") and node.attr[1:2] != "_"
            of_self = isinstance(node.value, ast.Name) and node.value.id in OWN
            known = own | PROMISED
            if private and not of_self and node.attr not in known:
                faults.append(f"{place(path)}:{node.lineno} {node.attr}")
    assert not faults, "\n".join(faults)


def lines_of_code(function: Any) -> int:
    """From the first statement after the docstring to the end."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        body = body[1:]
    assert body[-1].end_lineno is not None
    return body[-1].end_lineno - body[0].lineno + 1


def test_nothing_is_too_long_for_a_head() -> None:
    faults = []
    for path in modules():
        text = path.read_text()
        if len(text.splitlines()) > LONGEST_MODULE:
            faults.append(place(path))
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and lines_of_code(node) > LONGEST_FUNCTION:
                faults.append(f"{place(path)}: {node.name}")
    assert not faults, "\n".join(faults)


def test_rooms_are_small() -> None:
    rooms = collections.Counter(
        path.parent.name for path in modules() if path.stem != "__init__"
    )
    del rooms[PACKAGE.name]
    assert {r: n for r, n in rooms.items() if n > MOST_MODULES} == {}


def test_few_modules_are_for_another_one_alone() -> None:
    names = {name_of(path): path for path in modules()}
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for name, path in names.items():
        for target in imported(ast.parse(path.read_text())):
            for module in {target, target.rpartition(".")[0]} & set(names):
                importers[module].add(name)
    short = [
        name
        for name, path in names.items()
        if path.stem != "__init__"
        and len(path.read_text().splitlines()) < SHORT
        and len(importers[name] - {name}) <= 1
    ]
    assert len(short) <= MOST_SHORT, short


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_few_files(name: str) -> None:
    make, most = STEPS[name]
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((9,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make(), loss)
    model.optimizer.build(model.trainable_variables)
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(
            str(PACKAGE)
        ):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        model.train_on_batch(np.ones((16, 9)), np.arange(16) % 4)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert 10 < len(files) <= most, sorted(files)
