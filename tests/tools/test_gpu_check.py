"""The checks of GPUs, on a machine without GPUs."""

import json
import pathlib
from typing import Any

import pytest

import gpu_check

NEED_GPUS = ["two GPUs", "two processes, NCCL", "memory", "steps"]


@pytest.mark.parametrize(
    ("result", "state"),
    [
        ({"losses": [2.0, 1.0]}, "passed"),
        ({"losses": [1.0, 2.0]}, "FAILED"),
        ({"losses": [1.0, float("nan")]}, "FAILED"),
        ({"losses": [2.0, 1.0], "skipped": 3}, "FAILED"),
    ],
)
def test_states(
    result: Any,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """Checks that need GPUs are skipped by name; the processes are replaced."""
    answer = {"GPUs": [], "CUDA": None, "skipped": 0, "XLA": False} | result
    monkeypatch.setattr(gpu_check, "run_part", lambda task, **_: dict(answer))
    file = tmp_path / "record.json"
    names = ["FOSI", *NEED_GPUS]
    code = gpu_check.main(["--json", str(file), "--only", *names])
    assert code == (state == "FAILED")
    checks = json.loads(file.read_text())["checks"]
    states = {check["check"]: check["state"] for check in checks}
    assert states == {"FOSI": state} | dict.fromkeys(NEED_GPUS, "skipped")
