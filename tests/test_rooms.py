"""Structure of tfkfac/: imports between packages, private names, sizes.

Also the number of changes of file in the trace of a step.
"""

import ast
import collections
import graphlib
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfkfac

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tfkfac"
# The packages that a package may import, from the top to the bottom.
MAY = {
    "callbacks": {"kfac", "fosi", "gauss_newton", "shell", "training",
                  "cluster", "capture", "distributed", "saving", "compat"},
    "kfac": {"shell", "training", "fisher", "curvature", "solvers",
             "blocks", "factors", "loss", "capture", "distributed", "linalg",
             "saving", "compat"},
    "fosi": {"shell", "training", "curvature", "loss", "capture",
             "distributed", "linalg", "saving", "compat"},
    "gauss_newton": {"shell", "training", "fisher", "curvature", "loss",
                     "capture", "distributed", "linalg", "saving", "compat"},
    "shell": {"training", "loss", "capture", "distributed",
              "saving", "compat"},
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
EVERYBODY = "checks"  # a module that every package may import
UNPROMISED = (
    "keras.src", "keras_hub", "tensorflow.python", "tensorflow.compiler"
)  # fmt: skip
# Names of a method's object; `cls`: a class method may use private names.
OWN = {"self", "cls"}
# Documented names of named tuples, and of `sys`.
PROMISED = {"_asdict", "_replace", "_current_frames"}
LONGEST_MODULE = 600
LONGEST_FUNCTION = 60
MOST_MODULES = 12  # of a room
MOST_USED_ONCE = 250
# Upper bounds: calls into another file, outside of compat/, in the trace of a
# step of two dense layers.
MOST_CHANGES = {
    "natural": 415,
    "spectral": 585,  # with a product with the Gauss-Newton matrix
    "FOSI": 190,
    "GaussNewton": 270,
}
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def place(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def name_of(path: pathlib.Path) -> str:
    name = place(path).removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES}


def imported(path: pathlib.Path) -> Iterator[str]:
    """The modules that a module imports, and the names that it imports."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


def test_a_package_imports_only_packages_below_it() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert rooms == set(MAY)
    order = list(MAY)
    for room, others in MAY.items():
        for other in others:
            above = order.index(other) <= order.index(room)
            # These two are on the same level.
            assert not above or (other, room) == ("linalg", "capture")
    faults = []
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0]
        for name in imported(path):
            top, other, *_ = [*name.split("."), ""]
            allowed = {room, EVERYBODY, *MAY.get(room, ())}
            if room in MAY and top == "tfkfac" and other not in allowed:
                faults.append(f"{place(path)} imports {name}")
    assert not faults, "\n".join(faults)


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {
        name: {
            target
            for full_name in imported(path)
            for target in (full_name, full_name.rpartition(".")[0])
            if target in NAMES and target != name
        }
        for name, path in NAMES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_unpromised_modules_stay_in_compat() -> None:
    faults = [
        f"{place(path)} imports {name}"
        for path in MODULES
        if path.parent.name != "compat"
        for name in imported(path)
        if name.startswith((*UNPROMISED, "unittest"))
    ]
    assert not faults, "\n".join(faults)


def private_names(tree: ast.AST) -> set[str]:
    """Underscored names that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(getattr(node.target, "id", ""))
    return names


def test_underscored_names_of_others_stay_in_compat() -> None:
    """A module uses `x._y` only if it defines a `_y`."""
    faults = []
    for path in MODULES:
        known = private_names(TREES[path]) | PROMISED
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.Attribute) or node.attr in known:
                continue
            private = node.attr.startswith("_") and node.attr[1:2] != "_"
            of_self = getattr(node.value, "id", "") in OWN
            if private and not of_self and path.parent.name != "compat":
                faults.append(f"{place(path)}:{node.lineno} {node.attr}")
    assert not faults, "\n".join(faults)


def lines_of_code(function: Any) -> int:
    """From the first statement after the docstring to the end."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        body = body[1:]
    return int(body[-1].end_lineno - body[0].lineno + 1)


def lines_of(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines())


def test_modules_functions_and_packages_are_small() -> None:
    faults = [
        place(path) for path in MODULES if lines_of(path) > LONGEST_MODULE
    ]
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and lines_of_code(node) > LONGEST_FUNCTION:
                faults.append(f"{place(path)}: {node.name}")
    assert not faults, "\n".join(faults)
    rooms = collections.Counter(
        path.parent.name for path in MODULES if path.stem != "__init__"
    )
    del rooms[PACKAGE.name]
    assert {r: n for r, n in rooms.items() if n > MOST_MODULES} == {}


def test_few_functions_are_used_once() -> None:
    """Functions with a name of their own, to which one place refers."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    defined = collections.Counter(
        node.name for node in nodes if isinstance(node, ast.FunctionDef)
    )
    uses = collections.Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute))
    )
    once = [n for n in defined if defined[n] == uses[n] == 1]
    print(f"functions with one use: {len(once)}")  # shown by `pytest -rP`
    assert len(once) <= MOST_USED_ONCE


# ------------------------------------------------ calls in the trace of a step
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "natural": lambda: tfkfac.KFAC(step="natural"),
    "spectral": lambda: tfkfac.KFAC(step="spectral"),
    "FOSI": lambda: tfkfac.FOSI("sgd", warmup_steps=1, update_interval=3),
    "GaussNewton": tfkfac.GaussNewton,
}


def count_changes(optimizer: str) -> int:
    """Trace a step of two dense layers; count the changes of file.

    A change is a call into another file than that of the call before, outside
    of `compat/`.
    """
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((9,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss)
    model.optimizer.build(model.trainable_variables)
    files: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        is_outside = file.startswith(f"{PACKAGE}/") and "/compat/" not in file
        if event == "call" and is_outside:
            files.append(file)

    sys.settrace(record)
    try:
        model.train_on_batch(np.ones((16, 9)), np.arange(16) % 4)
    finally:
        sys.settrace(None)
    return sum(a != b for a, b in itertools.pairwise(files))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_seldom_changes_file(name: str) -> None:
    changes = count_changes(name)
    print(f"{name}: {changes}")  # shown by `pytest -rP`
    assert 50 < changes <= MOST_CHANGES[name]
