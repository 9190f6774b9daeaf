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
        (["--variants", "lion"], "'lion' is none of"),
        (["--mixes", "10"], "'10' is not FACTOR,INVERSE"),
        (["--workers", "2", "--mode", "batch"], "in --mode fit only"),
        (["--first-step", "1", "--plot", "x.png"], "has no plot"),
    ],
)
def test_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(arguments)
    assert message in capsys.readouterr().err


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
    monkeypatch.setattr(results, "last_commit", lambda: "abc1234")
    plot = tmp_path / "steps.png"
    rows = run(
        tmp_path,
        *SMALL,
        *("--variants", "kfac-inverse:damping=0.1"),
        *("--record", "--plot", str(plot)),
    )
    assert "kfac-inverse:damping=0.1" in capsys.readouterr().out
    (kfac,) = rows
    assert kfac["mixes"]["(1,2)"]["steps"] == 20
    # A and G of two layers, and their inverses, in float32.
    assert kfac["state_bytes"] >= 2 * 2 * 4 * (9**2 + 8**2)
    assert plot.stat().st_size > 10_000
    page = results.PAGE.read_text()
    assert "| mlp-8x2 |" in page
    assert "Recorded in: `abc1234`." in page


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
