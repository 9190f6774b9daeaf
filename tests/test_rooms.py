"""Structure of tfkfac/: imports between packages, private names, sizes.

Also how often the trace of a step changes from one file to another.
"""

import ast
import collections
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import traced_calls
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tests.support.traced_calls import OPTIMIZERS, Counts, count_calls

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tfkfac"
# The packages that a package may import, from the top to the bottom.
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
EVERYBODY = "checks"  # a module that every package may import
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
# Calls into another file, outside of compat/, in the trace of a step of two
# dense layers; a reader changes file as often.
MOST_CHANGES = {
    "natural": 450,
    "spectral": 500,
    "FOSI": 250,
    "DHO2": 250,
    "GaussNewton": 300,
}
JOBS = Jobs(traced_calls)
JOBS.add("two: DHO2", "count_on_worker", "FOSI")


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
            assert node.level == 0, "relative imports hide the package"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


def test_every_package_has_a_row() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert rooms == set(MAY)


def test_a_package_imports_only_packages_below_it() -> None:
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


def test_the_packages_are_in_order() -> None:
    """Imports run downwards only, so no two rooms need each other."""
    order = list(MAY)
    for room, others in MAY.items():
        for other in others:
            above = order.index(other) <= order.index(room)
            # These two are on one level.
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


def test_modules_and_functions_are_short() -> None:
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


def test_packages_are_small() -> None:
    rooms = collections.Counter(
        path.parent.name for path in modules() if path.stem != "__init__"
    )
    del rooms[PACKAGE.name]
    assert {r: n for r, n in rooms.items() if n > MOST_MODULES} == {}


def test_few_short_modules_have_one_importer() -> None:
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


def check_changes(name: str, counts: Counts) -> None:
    print(f"{name}: {counts}")  # shown by `pytest -rP`
    assert 50 < counts.changes <= MOST_CHANGES[name], counts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_seldom_changes_file(name: str) -> None:
    check_changes(name, count_calls(name))


def test_a_step_of_two_workers_seldom_changes_file(pool: Pool) -> None:
    for counts in JOBS.results(pool, "two: DHO2"):
        check_changes("DHO2", counts)
