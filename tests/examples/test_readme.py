"""The snippets of README and guide run, after README's complete program."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pages" / "guide"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(path: pathlib.Path) -> list[str]:
    """The Python of a file in Markdown."""
    return SNIPPET.findall(path.read_text())


def run(folder: pathlib.Path, text: str) -> str:
    """Runs a script in a folder; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_snippets_of_the_guide(tmp_path: pathlib.Path) -> None:
    [four_lines, program, *_] = snippets(ROOT / "README.md")
    [tuned] = snippets(GUIDE / "tuning.md")
    [spectral] = snippets(GUIDE / "spectral.md")
    [*_, loop] = snippets(GUIDE / "training.md")
    script = [
        program,
        tuned.replace("epochs=6", "epochs=1"),
        spectral,
        "model.compile(optimizer, loss)\nmodel.fit(x, y, batch_size=250)",
        "import tensorflow as tf",
        loop,
        "print('loss', float(train_step(x[:250], y[:250])))",
        four_lines,
    ]
    assert "loss 0." in run(tmp_path, "\n".join(script))
