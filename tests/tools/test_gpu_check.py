"""The check of GPUs where there is none: what is left out, and what is not."""

import json
import pathlib
from typing import Any

import pytest

import gpu_check

NEED_GPUS = ["two GPUs", "two processes, NCCL", "memory"]


def fake(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Parts that do nothing."""
    answer = {"GPUs": [], "CUDA": None, "skipped": 0, "XLA": False} | found

    def part(self: Any, task: Any, **_: Any) -> dict[str, Any]:
        return dict(answer)

    monkeypatch.setattr(gpu_check.Bench, "part", part)


def test_what_needs_a_gpu_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fake(monkeypatch, losses=[2.0, 1.0])
    file = tmp_path / "record.json"
    names = ["FOSI", *NEED_GPUS]
    assert gpu_check.main(["--json", str(file), "--only", *names]) == 0
    checks = json.loads(file.read_text())["checks"]
    states = {one["check"]: one["state"] for one in checks}
    assert states == {"FOSI": "passed"} | dict.fromkeys(NEED_GPUS, "left out")
    assert checks[-1]["seen"] == "needs 1 GPU, there are 0"


@pytest.mark.parametrize(
    "found",
    [
        {"losses": [1.0, 2.0]},
        {"losses": [1.0, float("nan")]},
        {"losses": [2.0, 1.0], "skipped": 3},
    ],
)
def test_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, found: Any
) -> None:
    fake(monkeypatch, **found)
    assert gpu_check.main(["--only", "FOSI"]) == 1
    assert "FOSI: FAILED" in capsys.readouterr().out


@pytest.mark.slow
def test_on_a_cpu(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "record.json"
    names = ["KFAC, Cholesky", "GaussNewton", "mixed float16", *NEED_GPUS]
    only = ["--only", *names, "steps"]
    assert gpu_check.main(["--quick", "--json", str(file), *only]) == 0
    checks = json.loads(file.read_text())["checks"]
    left_out = [c["check"] for c in checks if c["state"] == "left out"]
    assert left_out == NEED_GPUS
    assert {row["variant"] for row in checks[-1]["rows"]} == {
        *gpu_check.VARIANTS
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [{"replicas": "mirrored"}, {"replicas": "workers", "workers": 2}]
)
def test_two_replicas_on_a_cpu(tmp_path: pathlib.Path, task: Any) -> None:
    """What two GPUs will do, on two parts of a CPU and by two processes."""
    bench = gpu_check.Bench(tmp_path, quick=True)
    assert bench.train("kfac inverse", **task)["off"] < 1e-4
