"""The tool that plans: its arguments, its tables, the papers' figures."""

import dataclasses
import itertools
import re
from typing import Any

import keras
import pytest

import papers
import plan
from cost_model import Candidate, Estimate

CLUSTER = ["--flops", "1T", "--bandwidth", "10Gbit", "--latency", "5us"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str) -> Any:
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(3, 3, name="conv"),
                keras.layers.Flatten(),
                keras.layers.Dense(4, name="dense"),
            ]
        )

    monkeypatch.setattr(plan, "build", build)


# ------------------------------------------------------------------- tables
@pytest.mark.usefixtures("tiny")
def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Each distribution of four workers, with both solvers."""
    plan.main(["M", *CLUSTER, "--workers", "4", "--intervals", "7,70"])
    text = capsys.readouterr().out
    for solver, mode in itertools.product(
        ("inverse", "eigen"), ("comm_opt", "mem_opt", "dp_kfac")
    ):
        assert f"\n{solver:7}  {mode}" in text
    assert "hybrid_opt 0.5" in text and "mean ms at 7,70" in text
    # 9 + 1 inputs and 3 outputs; 6 x 6 x 3 + 1 inputs and 4 outputs.
    elements = 10**2 + 3**2 + 109**2 + 4**2
    assert f"2 blocks: {elements / 1e6:.2f} M elements" in text
    assert "Recommended: KFAC(distribution=" in text
    # The factor A of the dense layer and all decompositions of a worker,
    # without both of the dense layer.
    saved = 4 * (109**2 + elements - 2 * (109**2 + 4**2))
    assert f"dp_kfac saves {saved} B of a worker" in text


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
    words = ["--model", "own:make", *CLUSTER, "--workers", "2"]
    for limit, elements in (("none", 6 * 300**2), ("100", 6 * 300 * 64)):
        plan.main([*words, "--max-factor-dim", limit])
        text = capsys.readouterr().out
        assert f"3 blocks: {elements / 1e6:.2f} M elements" in text
        header, *rows = [
            re.split("  +", line) for line in text.splitlines()[3:] if line
        ]
        column = header.index("speed-up")
        speed_ups = {row[1]: row[column] for row in rows if len(row) > column}
        assert speed_ups == {
            "comm_opt": "2",
            "mem_opt": "1.5",
            "dp_kfac": "1.5",
        }
    plan.main(["--model", "own:uncovered", *CLUSTER, "--workers", "2"])
    assert "0 blocks: 0.00 M elements" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_batch_in_the_saved_memory() -> None:
    """An example has 6 x 6 x 3 outputs twice, and 4 outputs, of 4 bytes."""
    estimates = [
        Estimate(
            Candidate(mode, None, "inverse"), {}, 0.0, 1.0, {}, {"total": size}
        )
        for mode, size in (("comm_opt", 10_000), ("dp_kfac", 1_000))
    ]
    text = plan.batch_text(estimates, plan.build("M"), 4)
    assert f"{9000 / 880:.2f} examples of 880 B" in text
    assert f"A batch of 4 becomes {4 + 9000 // 880}." in text


@pytest.mark.slow
def test_papers() -> None:
    """DP-KFAC, tables 2 and 5; KAISA's ranking and gain."""
    case = papers.CASES["ResNet-50"]
    network = papers.PaperNetwork(case)
    assert round(network.num_factor_elements / 1e6, 1) == 153.9
    assert round(network.num_weights / 1e6, 1) == 25.6
    machine = papers.fit(network, case.marks)
    assert network.fresh(machine) == pytest.approx(case.marks, rel=0.015)
    eigen = papers.PaperNetwork(case, "eigen")
    order = ["comm_opt", "hybrid_opt 0.5", "mem_opt"]
    assert list(papers.kaisa(eigen, machine)) == order
    for cluster in (machine, papers.KAISA_CLUSTER):
        assert list(papers.kaisa(eigen, cluster, (1, 1))) == order[::-1]
    assert 0.1 < papers.gain(papers.kaisa(eigen, papers.KAISA_CLUSTER)) < 0.244
    hop = papers.hop_of_kaisa(eigen)
    slow = dataclasses.replace(papers.KAISA_CLUSTER, latency=hop)
    assert papers.gain(papers.kaisa(eigen, slow)) == pytest.approx(0.244)
