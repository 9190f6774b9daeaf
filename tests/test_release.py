"""What is released: one version everywhere, and packages that work elsewhere.

The quick set, tests/quick.txt, has what the private names of Keras and
TensorFlow promise, each optimizer's steps by an oracle, saving and two workers:

    python -m pytest @tests/quick.txt
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import tfkfac

ROOT = pathlib.Path(__file__).parents[1]
VERSION = tfkfac.__version__


def test_one_version() -> None:
    """The package says it; others repeat it in their own form."""
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{VERSION}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert (
        "version = attr: tfkfac.__version__" in (ROOT / "setup.cfg").read_text()
    )


def test_the_quick_set_is_there() -> None:
    for line in (ROOT / "tests" / "quick.txt").read_text().splitlines():
        assert (ROOT / line).exists(), line


def test_workflows_run_what_is_there() -> None:
    """They cannot run here: they are small, and their commands exist."""
    texts = [p.read_text() for p in (ROOT / ".github").rglob("*.yml")]
    named = re.findall(r"- run: .*?(\S+\.(?:sh|txt))", "\n".join(texts))
    assert {"tools/test.sh", "tools/matrix.sh"} <= set(named)
    for name in named:
        assert (ROOT / name.removeprefix("@")).exists(), name


def run(*command: object, cwd: pathlib.Path) -> str:
    """Runs a command as a user does who has no checkout."""
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def installed(python: pathlib.Path, cwd: pathlib.Path) -> dict[str, str]:
    """The installed files of the package, with their hashes."""
    code = (
        "import importlib.metadata as m\n"
        "for f in m.files('tfkfac'):\n"
        "    if f.parts[0] == 'tfkfac' and f.hash: print(f, f.hash.value)"
    )
    lines = run(python, "-c", code, cwd=cwd).splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.slow
def test_wheel_and_source_distribution(tmp_path: pathlib.Path) -> None:
    """In an empty environment, where the quick set passes."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob(f"tfkfac-{VERSION}-*.whl")
    source = tmp_path / f"tfkfac-{VERSION}.tar.gz"
    modules = {p.relative_to(ROOT) for p in (ROOT / "tfkfac").rglob("*.py")}
    names = {str(p) for p in modules} | {"tfkfac/py.typed"}
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if "-info" not in n}
    assert inside == names
    # What is tested is what is installed: the package is not beside the tests.
    beside = tmp_path / "beside"
    for folder in ("tests", "examples", "tools"):
        shutil.copytree(ROOT / folder, beside / folder)
    shutil.copy(ROOT / "pyproject.toml", beside)
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, f"{wheel}[test]", cwd=tmp_path)
    files = installed(python, tmp_path)
    assert files.keys() == names
    run(python, "-m", "pytest", "-q", "@tests/quick.txt", cwd=beside)
    run(*pip, "--no-deps", "--force-reinstall", source, cwd=tmp_path)
    assert installed(python, tmp_path) == files
    version = "import importlib.metadata as m; print(m.version('tfkfac'))"
    assert run(python, "-c", version, cwd=tmp_path).strip() == VERSION
