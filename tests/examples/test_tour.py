"""The notebook: ten cells that run from top to bottom."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def test_ten_cells_without_outputs() -> None:
    """What is in it does not depend on who ran it last."""
    assert len(cells()) == len({cell["id"] for cell in cells()}) == 10
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) == 5
    assert not any(c["outputs"] or c["execution_count"] for c in code)


@pytest.mark.slow
def test_all_cells_run() -> None:
    code = [c["source"] for c in cells() if c["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(map("".join, code))],
        cwd=NOTEBOOK.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^(Adam|K-FAC) +loss ([\d.]+)", done.stdout, re.M)
    adam, kfac = (float(number) for _, number in losses)
    assert kfac < adam < 0.1
    assert "Preconditioned weights: 26,122 of 26,122" in done.stdout
    assert done.stdout.count("largest eigenvalues: [") == 2
    assert "[worker 1] Epoch 2/2" in done.stdout
