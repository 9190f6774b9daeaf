"""What is chosen and claimed of trainings, worked out by hand."""

from typing import Any

import pytest

from targets import plan, report, results


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


def record(
    method: str,
    seed: int,
    *curve: tuple[float, float | None],
    **run: Any,
) -> dict[str, Any]:
    """A curve of processor seconds and metrics, a step for each point."""
    usual = {"phase": "final", "problem": "cnn", "size": "small"}
    usual |= {"data": "digits", "method": method, "rate": None, "rest": None}
    usual |= {"decay": 0.0, "batch": 250, "share": 1.0, "seed": seed}
    seconds, metrics = zip(*curve, strict=True)
    return {
        "run": usual | run,
        "environment": 0,
        "first_step": 1.5,
        "curve": {
            "step": [*range(1, len(curve) + 1)],
            "seconds": [2 * each for each in seconds],
            "cpu_seconds": [*seconds],
            "metric": [*metrics],
        },
    }


def cnn_records() -> list[dict[str, Any]]:
    """Adam ends best, AdamW as well as it a little sooner."""
    return [
        record("adam", 0, (10.0, 0.5), (20.0, 0.90)),
        record("adam", 1, (10.0, 0.6), (20.0, 0.92)),
        record("sgd", 0, (8.0, 0.5), (16.0, 0.90)),
        record("sgd", 1, (8.0, 0.5), (16.0, 0.91)),
        record("kfac", 0, (4.0, 0.5), (5.0, 0.90), (6.0, 0.95)),
        record("kfac", 1, (4.0, 0.5), (5.0, 0.91), (6.0, 0.92)),
    ]


def rows_of(comparison: results.Comparison) -> dict[str, results.Row]:
    return {row.setting.method: row for row in comparison.rows}


def test_the_target_is_the_best_baselines_last_metric() -> None:
    [comparison] = results.compare(cnn_records())
    assert comparison.best.setting.method == "adam"
    assert comparison.first == comparison.best
    rows = rows_of(comparison)
    assert rows["kfac"].seconds == [5.0, 6.0]
    assert rows["kfac"].ratios == [0.25, 0.3]
    # Gains of 15 and 14 seconds: 14.5 * sqrt(2) = 29 deviations of 0.71.
    assert rows["kfac"].claim == "less"
    assert not rows["sgd"].arrives and rows["sgd"].ratios == ()
    assert results.geometric_means([comparison]) == {"kfac": (0.275, 1)}


def test_the_ratio_is_to_the_first_baseline_at_the_target() -> None:
    """SGD is there before the best baseline, and before K-FAC."""
    records = cnn_records()
    records[2:4] = [
        record("sgd", seed, (1.0 + seed, metric), (2.0, 0.1))
        for seed, metric in ((0, 0.90), (1, 0.92))
    ]
    [comparison] = results.compare(records)
    assert comparison.first.setting.method == "sgd"
    rows = rows_of(comparison)
    assert rows["kfac"].ratios == [5.0, 3.0]
    # 4 and 4 seconds more.
    assert rows["kfac"].claim == "more"


def test_losing_rows_stay() -> None:
    records = cnn_records()
    records[-1] = record("kfac", 1, (4.0, 0.5), (5.0, 0.91))
    [comparison] = results.compare(records)
    row = rows_of(comparison)["kfac"]
    assert row.claim == "not reached" and row.ratios == ()
    assert results.geometric_means([comparison]) == {}
    _, lines = report.full_table([comparison])
    [line] = [line for line in lines if line[0] == "`kfac`"]
    assert "1 of 2 seeds" in line and "not reached" in line


def test_the_quickest_of_equal_settings_is_chosen() -> None:
    """Errors of 0.1 and 0.1009 are level, 0.1011 and what diverges not."""
    records = [
        record("muon", 0, (40.0, 0.9), phase="search", batch=125),
        record("muon", 0, (20.0, 0.8991), phase="search", batch=250),
        record("muon", 0, (10.0, 0.8989), phase="search", batch=500),
        record("muon", 0, (5.0, None), phase="search", rate=1.0),
    ]
    best = plan.best_setting(records)
    assert best is not None and best.batch == 250
    # Errors of 0.2 are good enough where the best baseline has these.
    half = record("muon", 0, (4.0, 0.85), phase="search", share=0.5)
    best = plan.best_setting([*records, half], 0.2)
    assert best is not None and best.share == 0.5


def test_the_table_of_the_readme() -> None:
    columns, [line, mean] = report.summary([*results.compare(cnn_records())])
    assert columns[2] == "K-FAC"
    assert line[0] == "cnn, accuracy"
    assert line[1] == "adam: 0.91 ± 0.014 after 20 s"
    assert line[2] == "0.275 ± 0.035, **less**; 0.935 ± 0.021, level"
    assert mean[-1] == "0.28"


def test_the_tables_of_tiny_problems() -> None:
    """Mean losses: Adam 0.3 at its best, Muon 0.1, today's 0.2, ours 0.15."""
    ours = "kfac:step=spectral:rest=adam"
    ends = [
        ("adam", 0.001, 2.0, (0.2, 0.3, 0.4)),
        ("adam", 0.03, 2.0, (0.5, 0.5, 0.5)),
        ("muon", 0.01, 1.0, (0.1, 0.1, 0.1)),
        (report.TODAY, None, 3.0, (0.2, 0.21, 0.19)),
        (ours, None, 3.0, (0.15, 0.14, 0.16)),
    ]
    records = [
        record(method, seed, (seconds, loss), size="tiny", rate=rate)
        | {"validation": 0.5 + loss}
        for method, rate, seconds, losses in ends
        for seed, loss in enumerate(losses)
    ]
    constant = record("adam:schedule=constant", 0, (1.0, 0.9), size="tiny")
    constant["validation"] = 0.5
    found = report.tiny_ends([*records, constant])
    assert [*report.tiny_ends([*records, constant], constant=True)] == ["cnn"]
    _, [losses, others] = report.tiny_table(found)
    # 0.1 / sqrt(3) = 0.06.
    assert losses[1:3] == ["0.3 ± 0.06 (0.001)", "0.1 ± 0 (0.01)"]
    assert others[:2] == ["others, accuracy", "0.8"]
    _, [today, line] = report.marks(found)
    # Differences of 0.05, 0.07, 0.03: 0.05 * sqrt(3) is 4.3 deviations.
    assert line == (
        *(f"`{ours}`", "1", "1", "0.5 (cnn)", "0.5", "0 of 1", "1, 0", "1.5"),
    )
    assert today[-2:] == ("0, 0", "1.5")
