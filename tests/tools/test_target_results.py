"""Significance of a difference, and choice of a setting, worked out by hand.

`test_docs.py` compares all tables and sentences with the committed pages.
"""

from typing import Any

import pytest

from targets import plan, results


@pytest.mark.parametrize(
    "differences,claim",
    [
        # Mean 3, deviation 1: 3 * sqrt(3) = 5.2 deviations.
        ([2.0, 3.0, 4.0], "more"),
        ([-2.0, -3.0, -4.0], "less"),
        # Mean 2, deviation 2: sqrt(3) = 1.7 deviations.
        ([0.0, 2.0, 4.0], "tie"),
        # Mean 3, deviation sqrt(3): 3 deviations, and a little less.
        ([2.0, 2.001, 4.999], "more"),
        ([2.0, 1.999, 5.001], "tie"),
        ([5.0], "tie"),
        ([0.0, 0.0], "tie"),
    ],
)
def test_a_claim_takes_three_sigmas(
    differences: list[float], claim: str
) -> None:
    assert results.judge(differences) == claim


def test_the_quickest_of_equal_settings_is_chosen() -> None:
    """Errors of 0.1 and 0.1009 are level, 0.1011 and what diverges not."""

    def record(seconds: float, metric: float | None, **run: Any) -> Any:
        usual = {"phase": "search", "problem": "cnn", "size": "small"}
        usual |= {"data": "digits", "method": "muon", "rate": None}
        usual |= {"rest": None, "decay": 0.0, "share": 1.0, "seed": 0}
        curve = {"cpu_seconds": [seconds], "metric": [metric]}
        return {"run": usual | run, "curve": curve}

    records = [
        record(40.0, 0.9, batch=125),
        record(20.0, 0.8991, batch=250),
        record(10.0, 0.8989, batch=500),
        record(5.0, None, batch=250, rate=1.0),
    ]
    best = plan.best_setting(records)
    assert best is not None and best.batch == 250
    # Errors of 0.2 are good enough where the best baseline has these.
    half = record(4.0, 0.85, batch=250, share=0.5)
    best = plan.best_setting([*records, half], 0.2)
    assert best is not None and best.share == 0.5
