"""The command line, and runs with real processes."""

import json
import pathlib
from typing import Any

import pytest

import benchmark
import results


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--models", "M9"], "'M9' is none of M1"),
        (["--models", "mlp-0x2"], "'mlp-0x2' is none of"),
        (["--variants", "lion"], "'lion' is none of"),
        (["--mixes", "10"], "'10' is not FACTOR,INVERSE"),
        (["--rounds", "0"], "must be a whole number above 0; received '0'"),
        (["--workers", "2", "--mode", "batch"], "in --mode fit only"),
        (["--first-step", "1", "--plot", "x.png"], "has no plot"),
        (["--torch-python", "/no/python"], "no program '/no/python'"),
    ],
)
def test_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_recorded_ones() -> None:
    options = benchmark.parse_arguments(["--record", "--models", "M1"])
    assert options.models == ["M1"]
    assert options.variants == benchmark.RECORDED_VARIANTS


def run(folder: pathlib.Path, *arguments: str) -> list[dict[str, Any]]:
    result = folder / "result.json"
    code = benchmark.main(["--json", str(result), "--batch", "8", *arguments])
    assert code == 0
    return json.loads(result.read_text())["rows"]


SMALL = ("--models", "mlp-8x2", "--mixes", "1,2", "--rounds", "1")


@pytest.mark.slow
def test_a_run(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RECORDS", "PAGE", "README"):
        path = getattr(results, name)
        monkeypatch.setattr(results, name, tmp_path / path.name)
        (tmp_path / path.name).write_text(path.read_text())
    plot = tmp_path / "steps.png"
    rows = run(
        tmp_path,
        *SMALL,
        *("--variants", "kfac-inverse:damping=0.1", "torch-sgd"),
        *("--record", "--plot", str(plot)),
    )
    assert "kfac-inverse:damping=0.1" in capsys.readouterr().out
    kfac, torch = rows
    assert kfac["mixes"]["(1,2)"]["steps"] == 20
    # A and G of two layers, and their inverses, in float32.
    assert kfac["state_bytes"] >= 2 * 2 * 4 * (9**2 + 8**2)
    assert "unavailable" in torch  # no such model, or no PyTorch
    assert plot.stat().st_size > 10_000
    assert "| mlp-8x2 |" in results.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["batch", "dynamic"])
def test_modes(tmp_path: pathlib.Path, mode: str) -> None:
    _, kfac = run(
        tmp_path,
        *SMALL,
        *("--variants", "sgd", "kfac-inverse", "--mode", mode),
    )
    assert kfac["mixes"]["(1,2)"]["ratio"] > 0


@pytest.mark.slow
def test_workers(tmp_path: pathlib.Path) -> None:
    """The state of two workers: all inverses, half of the factors."""
    _, kfac = run(
        tmp_path,
        *SMALL,
        *("--variants", "sgd", "kfac-inverse", "--workers", "2"),
    )
    assert kfac["mixes"]["(1,2)"]["steps"] == 20
    gradients = kfac["communication_bytes"]["plain"]["gradients"]
    assert gradients >= 4 * 2 * 9 * 8  # half of them, twice


@pytest.mark.slow
@pytest.mark.parametrize("name", ["M2", "M3", "T", "D", "MobileNetV2"])
def test_models(name: str) -> None:
    from benchmarks.keras_training import KerasTraining
    from benchmarks.task import Task

    KerasTraining(Task(name, "sgd", {}, 2, "function")).run(lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["muon", "fosi-adam"])
def test_optimizers(tmp_path: pathlib.Path, variant: str) -> None:
    _, row = run(tmp_path, *SMALL, "--variants", "sgd", variant)
    assert row["mixes"]["(1,2)"]["ratio"] > 0


@pytest.mark.slow
def test_a_variant_that_dies(tmp_path: pathlib.Path) -> None:
    arguments = ["--variants", "kfac-nonsense", "--json"]
    result = tmp_path / "result.json"
    assert benchmark.main([*SMALL, *arguments, str(result)]) == 1
    [row] = json.loads(result.read_text())["rows"]
    assert "Received: solver='nonsense'" in row["error"]
