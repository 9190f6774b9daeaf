"""Releases: one version in all files, and packages that work elsewhere.

The quick set, tests/quick.txt, has the contracts of Keras and TensorFlow, each
optimizer's steps by an oracle, saving and two workers:

    python -m pytest @tests/quick.txt
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest

import package_page
import tfkfac

ROOT = pathlib.Path(__file__).parents[1]
VERSION = tfkfac.__version__


def test_one_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    development = ".dev" in VERSION
    heading = "[Unreleased]\n" if development else f"[{VERSION}] - "
    assert f"\n## {heading}" in (ROOT / "CHANGELOG.md").read_text()
    assert (
        "version = attr: tfkfac.__version__" in (ROOT / "setup.cfg").read_text()
    )


def test_supported_versions() -> None:
    """README's sentence, which two pages include, is that of setup.cfg."""
    config = (ROOT / "setup.cfg").read_text()
    bounds = re.findall(
        r"^ *(\w+)(?: = )?>=([\d.]+),<(\d+)\.(\d+)$", config, re.M
    )
    names = {"python_requires": "Python", "tensorflow": "TensorFlow"}
    names["keras"] = "Keras"
    ranges = [
        f"{names[key]} {low} to {major}.{int(minor) - 1}"
        for key, low, major, minor in bounds
        if key in names
    ]
    assert len(ranges) == 3
    readme = (ROOT / "README.md").read_text()
    sentence = f"{ranges[0]}, {ranges[1]}, and {ranges[2]}."
    mark = "<!-- --8<-- [start:versions] -->\n"
    assert f"{mark}tfkfac needs {sentence}\n" in readme
    classifiers = re.findall(r"Python :: (3\.\d+)$", config, re.M)
    assert ranges[0] == f"Python {classifiers[0]} to {classifiers[-1]}"
    for page in ("index.md", "guide/training.md"):
        text = (ROOT / "docs" / "pages" / page).read_text()
        assert '--8<-- "README.md:versions"\n' in text


def test_the_files_of_the_quick_set_and_of_workflows_exist() -> None:
    for line in (ROOT / "tests" / "quick.txt").read_text().splitlines():
        assert (ROOT / line).exists(), line
    texts = [p.read_text() for p in (ROOT / ".github").rglob("*.yml")]
    named = re.findall(r"- run: .*?(\S+\.(?:sh|txt))", "\n".join(texts))
    assert {"tools/test.sh", "tools/matrix.sh"} <= set(named)
    for name in named:
        assert (ROOT / name.removeprefix("@")).exists(), name


def test_links_of_the_package_page() -> None:
    """Links to files are absolute, or left out without an address."""
    readme = (ROOT / "README.md").read_text()
    pattern = r"\]\(([^)]*)\)"
    linked = set(re.findall(pattern, readme))
    kept = {link for link in linked if link.startswith(("https:", "#"))}
    assert len(kept) > 1
    bare = package_page.with_links(readme, None)
    assert set(re.findall(pattern, bare)) == kept and "![" not in bare
    assert "working on the code" in bare
    page = package_page.with_links(readme, "https://host/o/r")
    folders = {
        link: "raw" if link.endswith((".png", ".svg")) else "blob"
        for link in linked - kept
    }
    assert set(re.findall(pattern, page)) - kept == {
        f"https://host/o/r/{folder}/HEAD/{link}"
        for link, folder in folders.items()
    }


def run(*command: object, cwd: pathlib.Path) -> str:
    """Run a command without the environment's path of modules."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_of_the_source_distribution(tmp_path: pathlib.Path) -> None:
    """Tests of the quick set pass with the wheel, outside of the checkout.

    Type checkers find the package of an editable installation.
    A new environment takes the dependencies from this environment;
    `tools/matrix.sh` installs the declared dependencies.
    """
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    (modules,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (modules / "parent.pth").write_text(sysconfig.get_path("purelib"))
    pip = python, "-m", "pip", "install", "--quiet", "--ignore-installed"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    run(*pip, *project["build-system"]["requires"], cwd=tmp_path)
    source = tmp_path / "source"
    for folder in ("tfkfac", "tools"):
        shutil.copytree(ROOT / folder, source / folder)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    here = "--no-deps", "--no-build-isolation", "--editable"
    run(*pip, *here, source, cwd=tmp_path)
    # Fails if mypy cannot find the module.
    check = "-m", "mypy", "--follow-imports=skip", "-c", "import tfkfac"
    run(python, *check, cwd=tmp_path)
    # Builds the source distribution, and the wheel from it.
    build = python, "-m", "build", "--no-isolation", "--outdir", tmp_path
    run(*build, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob(f"tfkfac-{VERSION}-*.whl")
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (n for n in files.namelist() if n.endswith("/METADATA"))
        assert "](docs/" not in files.read(metadata).decode()
    sources = {p.relative_to(ROOT) for p in (ROOT / "tfkfac").rglob("*.py")}
    names = {n for n in zipfile.ZipFile(wheel).namelist() if "-info" not in n}
    assert names == {str(p) for p in sources} | {"tfkfac/py.typed"}
    run(*pip, "--no-deps", wheel, cwd=tmp_path)
    checkout = tmp_path / "checkout"  # without the package
    for folder in ("tests", "examples", "tools"):
        shutil.copytree(ROOT / folder, checkout / folder)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    place = "import tfkfac; print(tfkfac.__file__)"
    assert str(modules) in run(python, "-c", place, cwd=checkout)
    quick = "-m", "pytest", "-q", "@tests/quick.txt", "-k", "test_oracles"
    run(python, *quick, cwd=checkout)
