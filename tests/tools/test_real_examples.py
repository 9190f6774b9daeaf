"""Programs of the kinds of the keras.io examples, and their table."""

import json
import pathlib
from typing import Any

import pytest

import real_examples
import results


def record(method: str, seed: int, loss: float, **rest: Any) -> dict[str, Any]:
    usual = {"program": "gan", "steps": 9, "first_step": 2.0, "step": 0.1}
    usual |= {"validation": 1.0, "covered": 0.75, "warnings": []}
    return {**usual, "method": method, "seed": seed, "loss": loss, **rest}


def test_losing_rows_stay_in_the_table() -> None:
    """Mean losses 2 and 1.5; steps of 0.3 and 0.1 CPU s; Keras' warning."""
    columns, [gan, level] = results.examples_table(
        [
            record("kfac", 0, 1.0, step=0.4, warnings=["loss", "shuffle"]),
            record("kfac", 1, 3.0, step=0.2, warnings=["shuffle"]),
            record("adam", 0, 1.0, warnings=["shuffle"]),
            record("adam", 1, 2.0),
            record("sgd:learning_rate=0.3:momentum=0.9", 0, 4.0),
            record("adam:learning_rate=0.1:falling=yes", 0, 5.0),
            record("adam:learning_rate=0.2:falling=yes", 0, 4.0),
            record("adam:learning_rate=0.2:falling=yes", 1, 5.0),
        ]
    )
    assert columns[0] == "program"
    assert gan[:4] == ("gan", "9", "75%", "2 / 1")
    assert gan[4:6] == ("1.5 / 1", "4 / 1 (sgd 0.3)")
    assert gan[6:] == ("4.5 / 1 (0.2)", "", "3.00", "2.0 / 2.0", "1")
    assert level[:4] == ("at or below Adam", "", "", "0 / 1 of 1")


def test_new_records_replace_old_ones(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "records.json"
    real_examples.save(file, [record("kfac", 0, 1.0), record("adam", 0, 2.0)])
    real_examples.save(file, [record("kfac", 0, 3.0)])
    records = json.loads(file.read_text())["records"]
    assert [(r["method"], r["loss"]) for r in records] == [
        ("adam", 2.0),
        ("kfac", 3.0),
    ]


def test_errors_are_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(program: str, method: str, seed: int) -> dict[str, Any]:
        raise ValueError("no luck")

    monkeypatch.setattr(real_examples, "train", fail)
    records = real_examples.train_all(("gan", ["adam", "kfac"], [0, 1]))
    assert [r["error"] for r in records] == ["ValueError: no luck"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("program", real_examples.PLACES)
def test_at_most_ten_percent_above_adam(program: str) -> None:
    """The training loss of `fit`, with dropout, from equal initial weights."""
    if not real_examples.is_here(program):
        pytest.skip("needs keras-hub")
    records = json.loads((results.DOCS / "real_examples.json").read_text())
    (adam,) = [
        record["objective"]
        for record in records["records"]
        if (record["program"], record["method"]) == (program, "adam")
        and record["seed"] == 0
    ]
    ours = real_examples.train(program, "kfac", 0)
    assert ours["objective"] <= 1.1 * adam
