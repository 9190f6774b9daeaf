"""The benchmark of a step: command line, arithmetic, runs of processes."""

import json
import pathlib
from typing import Any

import pytest

import benchmark


def test_median_of_each_phase() -> None:
    """Three intervals of four steps, from step 6 on; step 15 is disturbed."""
    by_step = {
        **{6: 1.0, 7: 2.0, 8: 9.0, 9: 4.0},
        **{10: 1.2, 11: 2.2, 12: 9.2, 13: 4.2},
        **{14: 1.1, 15: 70.0, 16: 9.1, 17: 4.1},
    }
    # Steps 8, 12 and 16 have phase 0, then come 9, 10 and 7.
    phases = benchmark.phases(4, 6, list(by_step.values()))
    assert phases == [9.1, 4.1, 1.1, 2.2]


@pytest.mark.slow
def test_a_run(tmp_path: pathlib.Path, capsys: Any) -> None:
    file = tmp_path / "result.json"
    words = ["--models", "mlp-8x2", "--mixes", "1,2", "--rounds", "1"]
    words += ["--batch", "8", "--json", str(file)]
    words += ["--variants", "adam", "kfac-inverse:damping=0.1", "fosi-adam"]
    assert benchmark.main(words) == 0
    assert "kfac-inverse:damping=0.1" in capsys.readouterr().out
    _, kfac, fosi = json.loads(file.read_text())["rows"]
    assert kfac["mixes"]["(1,2)"]["steps"] == 20
    assert fosi["mixes"]["(1,2)"]["mean_ms / adam"] > 0
    # A and G of two layers, and their inverses, in float32.
    assert kfac["state_bytes"] >= 2 * 2 * 4 * (9**2 + 8**2)
