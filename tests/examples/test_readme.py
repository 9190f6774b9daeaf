"""The README's first snippet runs as it is pasted."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_first_snippet(tmp_path: pathlib.Path) -> None:
    found = SNIPPET.search((ROOT / "README.md").read_text())
    assert found
    done = subprocess.run(
        [sys.executable, "-c", found[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "Preconditioned weights" in done.stdout
