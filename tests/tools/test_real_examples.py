"""Programs of the kinds of the keras.io examples, and their table."""

import json

import pytest

import real_examples
import results


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
