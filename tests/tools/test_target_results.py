"""Seconds to a target and claims, worked out by hand."""

from typing import Any

import pytest

from targets import report, results


@pytest.mark.parametrize(
    "gains,verdict",
    [
        # Mean 3, deviation 1: 3 * sqrt(3) = 5.2 deviations.
        ([2.0, 3.0, 4.0], "faster"),
        ([-2.0, -3.0, -4.0], "slower"),
        # Mean 2, deviation 2: sqrt(3) = 1.7 deviations.
        ([0.0, 2.0, 4.0], "open"),
        # Mean 3, deviation sqrt(3): 3 deviations, and a little less.
        ([2.0, 2.001, 4.999], "faster"),
        ([2.0, 1.999, 5.001], "open"),
        ([5.0], "open"),
    ],
)
def test_a_claim_takes_three_sigmas(gains: list[float], verdict: str) -> None:
    assert results.judge(gains) == verdict


def record(
    method: str,
    rate: float | None,
    seed: int,
    *curve: tuple[float, float],
    problem: str = "cnn",
    length: str = "full",
) -> dict[str, Any]:
    """A curve of processor seconds and metrics, a step for each point."""
    return {
        "run": {
            "problem": problem,
            "size": "small",
            "data": "digits",
            "method": method,
            "rate": rate,
            "length": length,
            "seed": seed,
            "threads": 1,
        },
        "first_step": {"seconds": 1.0, "cpu_seconds": 1.5},
        "curve": [
            {
                "step": step,
                "samples": 10 * step,
                "seconds": 2 * processor,
                "cpu_seconds": processor,
                "metric": metric,
            }
            for step, (processor, metric) in enumerate(curve, 1)
        ],
    }


def cnn_records() -> list[dict[str, Any]]:
    """Adam at 0.1 ends best; at 0.2 it is sooner at 0.9 but not better."""
    return [
        record("adam", 0.1, 0, (10.0, 0.5), (20.0, 0.90)),
        record("adam", 0.1, 1, (10.0, 0.6), (20.0, 0.92)),
        record("adam", 0.2, 0, (10.0, 0.89), (20.0, 0.89)),
        record("adam", 0.2, 1, (10.0, 0.93), (20.0, 0.80)),
        record("sgd", 0.1, 0, (8.0, 0.5), (16.0, 0.90), length="half"),
        record("sgd", 0.1, 1, (8.0, 0.5), (16.0, 0.91), length="half"),
        record("kfac", None, 0, (4.0, 0.5), (5.0, 0.90), (6.0, 0.95)),
        record("kfac", None, 1, (4.0, 0.5), (5.0, 0.91), (6.0, 0.92)),
    ]


def rows_of(comparison: results.Comparison) -> dict[str, results.Row]:
    return {row.setting.method: row for row in comparison.rows}


def test_the_target_is_the_best_baselines_last_metric() -> None:
    [comparison] = results.compare(cnn_records())
    assert (comparison.best.method, comparison.best.rate) == ("adam", 0.1)
    assert comparison.targets == [0.90, 0.92]
    rows = rows_of(comparison)
    assert rows["adam"].setting is comparison.best
    assert rows["adam"].ratio == [1.0, 1.0]
    assert rows["kfac"].values("cpu_seconds") == [5.0, 6.0]
    assert rows["kfac"].values("samples") == [20, 30]
    assert rows["kfac"].ratio == [0.25, 0.3]
    # Gains of 15 and 14 seconds: 14.5 * sqrt(2) = 29 deviations of 0.71.
    assert rows["kfac"].verdict == "faster"
    assert not rows["sgd"].arrives and rows["sgd"].ratio == []


def test_the_claim_is_against_the_first_baseline_at_the_target() -> None:
    """SGD is there before the best baseline, and before K-FAC."""
    records = cnn_records()
    records[4:6] = [
        record("sgd", 0.1, seed, (1.0 + seed / 10, metric), (2.0, 0.1))
        for seed, metric in ((0, 0.90), (1, 0.92))
    ]
    rows = rows_of(next(results.compare(records)))
    assert rows["sgd"].ratio == pytest.approx([0.05, 0.055])
    assert rows["kfac"].ratio == [0.25, 0.3]
    # -4 and -4.9 seconds: 4.45 * sqrt(2) = 9.9 deviations of 0.64.
    assert rows["kfac"].verdict == "slower"


def test_losing_rows_stay() -> None:
    records = cnn_records()
    records[-1] = record("kfac", None, 1, (4.0, 0.5), (5.0, 0.91))
    [comparison] = results.compare(records)
    row = rows_of(comparison)["kfac"]
    assert row.verdict == "not reached" and row.ratio == []
    assert list(results.geometric_means([comparison])) == []
    lines = report.markdown([comparison]).splitlines()
    [line] = [line for line in lines if line.startswith("| kfac |")]
    assert "1 of 2 seeds" in line and "not reached" in line
