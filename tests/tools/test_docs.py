"""The documentation builds, its figures are records, its calls are possible."""

import ast
import importlib.util
import inspect
import json
import operator
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import results
import tfkfac

ROOT = pathlib.Path(__file__).parents[2]


def test_figures_are_those_of_the_records() -> None:
    records = json.loads(results.RECORDS.read_text())
    assert results.PAGE.read_text() == results.page(records)
    readme = results.README.read_text()
    assert readme == results.with_table(readme)


def test_length_of_readme() -> None:
    assert len(results.README.read_text().split()) <= 1300


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "tools/README.md", "examples/README.md"],
)
def test_links_to_files(name: str) -> None:
    """Those of files that MkDocs does not build."""
    path = ROOT / name
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_modules_that_are_named_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`(?:tfkfac/)?([a-z_]+/(?:[a-z_]+\.py)?)`", text))
    assert "kfac/method.py" in named
    for name in named:
        assert (ROOT / "tfkfac" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None
    or importlib.util.find_spec("mkdocstrings") is None
    or importlib.util.find_spec("material") is None,
    reason="needs the extra `docs`",
)
def test_build(tmp_path: pathlib.Path) -> None:
    """Links and public names are looked at by the build itself."""
    config = ("--config-file", "docs/mkdocs.yml", "--site-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *config],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "optimizers" / "kfac.html").read_text()
    assert "tfkfac.KFAC.summary" in page  # by inheritance
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'(?:src|link[^>]* href)="(?:https?:)?//', page)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls of public names in the README and on the pages, with their file."""
    code = re.compile(r"^```python\n(.*?)^```$|`([^`\n]+)`", re.M | re.S)
    for path in (results.README, *results.PAGE.parent.rglob("*.md")):
        for block, inline in code.findall(path.read_text()):
            if not block and not re.match(r"(tfkfac\.|KFAC\()", inline):
                continue
            text = block or f"tfkfac.{inline.removeprefix('tfkfac.')}"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    if name.startswith("tfkfac.") and "(" not in name:
                        yield f"{path.name}: {ast.unparse(node)}", node


def test_calls_have_arguments_that_exist() -> None:
    found = dict(calls())
    assert len(found) > 15
    for text, node in found.items():
        value = operator.attrgetter(ast.unparse(node.func)[7:])(tfkfac)
        parameters = inspect.signature(value).parameters
        assert {k.arg for k in node.keywords} <= parameters.keys(), text
