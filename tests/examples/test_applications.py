"""Every script runs as a user starts it, with K-FAC and little data."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
APPLICATIONS = (
    "classification",
    "segmentation",
    "detection",
    "autoencoder",
    "language",
    "masked_language",
)


def run(*command: str, folder: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_quick_run(name: str, tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "examples" / f"{name}.py")
    kfac = 'kfac:skip_layers=["neck"]' if name == "detection" else "kfac"
    arguments = ["--quick", "--optimizer", kfac, "--json", "runs.json"]
    if name == "classification":
        arguments += ["--model", "cnn"]  # ResNet-32 takes long to trace
    said = run(script, *arguments, folder=tmp_path)
    assert "Preconditioned weights" in said
    record = json.loads((tmp_path / "runs.json").read_text())[kfac]
    assert record["losses"][-1] < record["losses"][0]
    assert record["state_bytes"]["total"] > 0
    if name == "detection":
        assert "neck" in said.partition("Left to the rest optimizer")[2]


@pytest.mark.slow
def test_quickstart(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "examples" / "quickstart.py")
    assert "Preconditioned weights" in run(script, folder=tmp_path)
