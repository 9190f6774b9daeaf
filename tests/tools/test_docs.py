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
    assert readme == results.with_parts(readme)


def test_length_of_readme() -> None:
    assert len(results.README.read_text().splitlines()) <= 150


NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    "tools/README.md",
    "examples/README.md",
)
DOCUMENTS = [
    *(ROOT / name for name in NAMES),
    *results.PAGE.parent.rglob("*.md"),
]
# Folders that are named by their place in the repository or in the package.
BASES = (ROOT, ROOT / "tfkfac")
FOLDERS = {p.name for base in BASES for p in base.iterdir() if p.is_dir()}
FILES = {
    path.name
    for folder in ("docs", "examples", "tests", "tfkfac", "tools")
    for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
} | {path.name for path in ROOT.iterdir()}
WRITTEN = {"demo/", "docs/site"}  # by scripts


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_named_files_exist(path: pathlib.Path) -> None:
    """In links of Markdown, and the sources that MkDocs puts into pages."""
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
        assert (path.parent / link).exists(), link
    assert "8 <" not in text, "ruff has formatted a snippet's mark"
    for source in re.findall(r'^(?:--8<--\s+"?)([\w./]+)', text, re.M):
        assert (ROOT / source).exists(), source
    # In backticks: paths, and names of files anywhere in a folder.
    for name in set(re.findall(r"`([\w.-]+/[\w./-]*)`", text)) - WRITTEN:
        if name.partition("/")[0] in FOLDERS:
            assert any((base / name).exists() for base in BASES), name
    for name in set(re.findall(r"`(\w+\.(?:py|sh|md|json))`", text)):
        assert name in FILES, name


def test_modules_that_docstrings_name_exist() -> None:
    pattern = rf"(?<![\w./-])(?:{'|'.join(sorted(FOLDERS))})/[a-z_/]*[a-z_]\b"
    package = ROOT / "tfkfac"
    named = 0
    for path in package.rglob("*.py"):
        for name in re.findall(pattern, path.read_text()):
            named += 1
            files = [
                base / end for base in BASES for end in (name, f"{name}.py")
            ]
            assert any(file.exists() for file in files), f"{path}: {name}"
    assert named > 5


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
    assert (tmp_path / "search" / "search_index.js").exists()
    assert (tmp_path / "examples" / "tour.ipynb").exists()
    tour = (tmp_path / "examples" / "tour.ipynb.html").read_text()
    assert 'src="data:image/png;base64,' in tour
    page = (tmp_path / "optimizers" / "kfac.html").read_text()
    assert "tfkfac.KFAC.summary" in page  # by inheritance
    assert "tfkfac.KFAC.count_steps" not in page  # not for users
    # Nothing is loaded from elsewhere; the search works in local files.
    assert 'src="../assets/iframe-worker.js"' in page
    assert not re.findall(r'(?:src|link[^>]* href)="(?:https?:)?//', page)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls of public names in the README and on the pages, with their file."""
    code = re.compile(r"^```python\n(.*?)^```$|`([^`\n]+)`", re.M | re.S)
    for path in (results.README, *results.PAGE.parent.rglob("*.md")):
        for block, inline in code.findall(path.read_text()):
            if not block and not re.match(r"(tfkfac\.|KFAC\()", inline):
                continue
            if block.startswith("--8<--"):  # a file of examples/
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
