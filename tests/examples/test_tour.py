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


def check(text: str) -> None:
    """Check what all cells have printed."""
    losses = re.findall(r"^(Adam|K-FAC) +loss ([\d.]+)", text, re.M)
    adam, kfac = (float(number) for _, number in losses)
    assert kfac < adam < 0.1
    assert "Preconditioned weights: 26,122 of 26,122" in text
    assert text.count("largest eigenvalues: [") == 2
    assert "[worker 1] Epoch 2/2" in text


def test_ten_cells_with_outputs() -> None:
    """Printed text and one small picture; no warnings, no path of a machine."""
    assert len(cells()) == len({cell["id"] for cell in cells()}) == 10
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [1, 2, 3, 4, 5]
    outputs = [output for cell in code for output in cell["outputs"]]
    texts = [o for o in outputs if o.get("name") == "stdout"]
    check("".join("".join(output["text"]) for output in texts))
    [picture] = [o["data"] for o in outputs if o not in texts]
    assert 10_000 < len(picture["image/png"]) < 60_000
    assert not re.search(r"/(home|tmp|usr|work)/", str(outputs))


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
    check(done.stdout)
