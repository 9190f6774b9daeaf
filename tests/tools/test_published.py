"""Published benchmarks: the trainings, their records, and the table."""

import json
import math
import multiprocessing.dummy
import pathlib
from typing import Any

import keras
import numpy as np
import pytest

import published
import results


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train in a thread."""
    threads = multiprocessing.dummy
    monkeypatch.setattr(
        published.multiprocessing, "get_context", lambda _: threads
    )
    monkeypatch.setattr(published.command, "process_environment", lambda _: {})
    yield
    keras.config.set_floatx("float32")


def test_the_rate_of_muon_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A rate of 0.016 is best, in 10 steps and in 20."""

    def train(
        text: bytes, name: str, rate: float | None, steps: int, seed: int
    ) -> dict[str, Any]:
        result = seed + abs(math.log((rate or 0.008) / 0.016))
        return {"result": result, "cpu_seconds": 2.0, "steps": steps}

    monkeypatch.setattr(published, "train_gpt", train)
    file, text = tmp_path / "records.json", tmp_path / "text"
    text.write_text("some text")
    words = ["nanogpt", "--text", str(text), "--steps", "20"]
    words += ["--seeds", "0", "1", "--json", str(file)]
    published.main(words)
    published.main(words)  # nothing is trained again
    records = json.loads(file.read_text())["records"]
    rates = [r["rate"] for r in records if r["optimizer"] == "muon"]
    tried = [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.016]
    assert rates == 2 * tried
    columns, rows = results.published_table(records)
    assert columns[2:] == ("optimizer", "steps", "seeds", "result", "CPU s")
    assert rows[2] == (
        *("nanogpt", "1.88", "Muon (0.016)", "10", "2", "0.5 ± 0.71", "2"),
    )
    assert [row[2:4] for row in rows] == [
        ("AdamW", "20"),
        ("`KFAC()`", "10"),
        ("Muon (0.016)", "10"),
        ("Muon (0.016)", "20"),
        ("`KFAC()`", "20"),
    ]


@pytest.mark.slow
def test_short_trainings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The loss of random characters, log(3), and two equations."""
    monkeypatch.setattr(published, "LAYERS", 1)
    text = bytes(np.random.default_rng(0).choice(list(b"abc"), 900).tolist())
    record = published.train_gpt(text, "adamw", None, 4, 0)
    assert record["result"] == pytest.approx(math.log(3), rel=0.1)
    file = tmp_path / "records.json"
    words = ["engd", "--seeds", "3", "--cpu-seconds", "0"]
    published.main([*words, "--json", str(file)])
    records = json.loads(file.read_text())["records"]
    for record, name in zip(records, ("poisson", "heat"), strict=True):
        assert (record["benchmark"], record["steps"]) == (name, 1)
        assert 0 < record["result"] < 100
    _, rows = results.published_table(records)
    assert [row[:5] for row in rows] == [
        ("poisson", "1e-6 to 1e-8", "`GaussNewton()`", "1", "1"),
        ("heat", "", "`GaussNewton()`", "1", "1"),
    ]
