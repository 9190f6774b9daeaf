"""The tool that plans: its tables, and numbers counted by hand."""

import itertools
import re
from typing import Any

import keras
import pytest
from keras import layers

import plan
import tfkfac


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str) -> Any:
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(3, 3, name="conv"),
                layers.Flatten(),
                layers.Dense(4, name="dense"),
            ]
        )

    monkeypatch.setattr(plan, "build", build)


def printed_rows(text: str) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of the table by solver and distribution."""
    lines = [line for line in text.splitlines() if "  " in line]
    header, *rows = [re.split("  +", line.strip()) for line in lines]
    return {tuple(row[:2]): dict(zip(header, row, strict=True)) for row in rows}


@pytest.mark.usefixtures("tiny")
def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Each distribution of four workers, with both solvers."""
    plan.main(["M", "--workers", "4"])
    text = capsys.readouterr().out
    modes = "comm_opt", "mem_opt", "hybrid_opt 0.5", "dp_kfac"
    assert set(printed_rows(text)) == {
        *itertools.product(("inverse", "eigen"), modes)
    }
    # 9 + 1 inputs and 3 outputs; 6 x 6 x 3 + 1 inputs and 4 outputs.
    elements = 10**2 + 3**2 + 109**2 + 4**2
    assert f"2 blocks: {elements / 1e6:.2f} M elements" in text
    # An example has 6 x 6 x 3 outputs twice, and 4 outputs, of 4 bytes. Saved:
    # the factor A of the dense layer, and decompositions of the dense layer.
    saved = 4 * (109**2 + elements - 2 * (109**2 + 4**2))
    batches = {
        mode: row["batch"]
        for (solver, mode), row in printed_rows(text).items()
        if solver == "inverse"
    }
    assert batches["comm_opt"] == "32"
    assert batches["dp_kfac"] == batches["mem_opt"] == str(32 + saved // 880)
    optimizer = tfkfac.KFAC(step="natural").attach(plan.build("M"))
    costs = plan.costs_of(optimizer, 4)
    states = {cost.mode: cost.state for cost in costs}
    most, least = (
        states[plan.Mode(mode, None, "inverse")]
        for mode in ("comm_opt", "dp_kfac")
    )
    assert most - least == saved


def test_own_model(
    tmp_path: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three equal layers on two workers: six factors, or three layers.

    A model without blocks has no speed-up.
    """
    (tmp_path / "own.py").write_text(
        "from keras import Input, Sequential, layers\n"
        "def make():\n"
        "    dense = [layers.Dense(300, use_bias=False) for _ in range(3)]\n"
        "    return Sequential([Input((300,)), *dense])\n"
        "def uncovered():\n"
        "    return Sequential([Input((4, 3)), layers.GRU(3)])\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--model", "own:make", "--workers", "2"]
    for limit, elements in (("none", 6 * 300**2), ("100", 6 * 300 * 64)):
        plan.main([*words, "--max-factor-dim", limit])
        text = capsys.readouterr().out
        assert f"3 blocks: {elements / 1e6:.2f} M elements" in text
        for (_, mode), row in printed_rows(text).items():
            assert row["speed-up"] == ("2" if mode == "comm_opt" else "1.5")
            if limit == "none":
                busiest = (3 if mode == "comm_opt" else 4) * 300**3
                assert row["decompositions, G"] == f"{busiest / 1e9:.4g}"
    plan.main(["--model", "own:uncovered", "--workers", "2"])
    assert "0 blocks: 0.00 M elements" in capsys.readouterr().out
