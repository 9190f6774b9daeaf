"""The checks of GPUs, on a machine without GPUs."""

import json
import pathlib
from typing import Any

import pytest

import gpu_check

NEED_GPUS = ["two GPUs", "two processes, NCCL", "memory", "steps"]


def fake(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Replace the processes."""
    answer = {"GPUs": [], "CUDA": None, "skipped": 0, "XLA": False} | changes

    def part(task: Any, **_: Any) -> dict[str, Any]:
        return dict(answer)

    monkeypatch.setattr(gpu_check, "run_part", part)


def test_checks_that_need_gpus_are_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fake(monkeypatch, losses=[2.0, 1.0])
    file = tmp_path / "record.json"
    names = ["FOSI", *NEED_GPUS]
    assert gpu_check.main(["--json", str(file), "--only", *names]) == 0
    checks = json.loads(file.read_text())["checks"]
    states = {check["check"]: check["state"] for check in checks}
    assert states == {"FOSI": "passed"} | dict.fromkeys(NEED_GPUS, "skipped")


@pytest.mark.parametrize(
    "result",
    [
        {"losses": [1.0, 2.0]},
        {"losses": [1.0, float("nan")]},
        {"losses": [2.0, 1.0], "skipped": 3},
    ],
)
def test_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, result: Any
) -> None:
    fake(monkeypatch, **result)
    assert gpu_check.main(["--only", "FOSI"]) == 1


def test_a_reference_uses_its_inverses_as_late_as_the_gpu(
    tmp_path: pathlib.Path,
) -> None:
    """With XLA, a step uses the inverses of the step before."""
    losses = {}
    for is_xla in (True, False):
        task = {"optimizer": "kfac inverse", "is_reference": True}
        task |= {"XLA": is_xla, "file": str(tmp_path / "weights")}
        record = gpu_check.train(task)
        assert record["XLA"] == is_xla
        losses[is_xla] = record["losses"]
    assert losses[True][0] == pytest.approx(losses[False][0])
    assert losses[True][-1] > 1.1 * losses[False][-1]


@pytest.mark.slow
def test_two_processes_on_a_cpu() -> None:
    """As on two GPUs."""
    record = gpu_check.check_training("kfac inverse", workers=2)()
    assert record["off"] < 1e-4 and record["losses"][-1] < record["losses"][0]
