"""What is chosen and claimed of trainings, worked out by hand.

`test_docs.py` compares all tables and sentences with the committed pages.
"""

from typing import Any

import pytest

from targets import plan, report, results

OURS = "kfac:step=natural"


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


def ends(method: str, seconds: float, *metrics: float) -> list[Any]:
    """Records of one evaluation each; the seeds count from 0."""
    return [
        record(method, seed, (seconds, metric))
        for seed, metric in enumerate(metrics)
    ]


def cnn_records() -> list[dict[str, Any]]:
    """Adam ends best, AdamW as well as it a little sooner."""
    return [
        record("adam", 0, (10.0, 0.5), (20.0, 0.90)),
        record("adam", 1, (10.0, 0.6), (20.0, 0.92)),
        record("sgd", 0, (8.0, 0.5), (16.0, 0.90)),
        record("sgd", 1, (8.0, 0.5), (16.0, 0.91)),
        record(OURS, 0, (4.0, 0.5), (5.0, 0.90), (6.0, 0.95)),
        record(OURS, 1, (4.0, 0.5), (5.0, 0.91), (6.0, 0.92)),
    ]


def rows_of(comparison: results.Comparison) -> dict[str, results.Row]:
    return {row.setting.method: row for row in comparison.rows}


def test_the_target_is_the_best_baselines_last_metric() -> None:
    """K-FAC's mean is 0.905 after 5 seconds and 0.935 after 6, Adam's 0.91."""
    [comparison] = results.compare(cnn_records())
    assert comparison.best.setting.method == "adam"
    rows = rows_of(comparison)
    assert rows[OURS].ratio == pytest.approx(0.3)
    # One seed alone: 5 of 16 seconds, SGD's, and 6 of 20: 0.306 +- 0.00625.
    assert rows[OURS].error == pytest.approx(0.00625)
    assert rows[OURS].claim == "less"
    assert rows["sgd"].ratio is None
    [(mean, count)] = results.geometric_means([comparison]).values()
    assert (mean, count) == (pytest.approx(0.3), 1)


def test_the_ratio_is_to_the_first_baseline_at_the_target() -> None:
    """SGD is there before the best baseline, and before K-FAC."""
    records = cnn_records()
    records[2:4] = [
        record("sgd", seed, (1.0 + seed / 2, metric), (2.0, 0.1))
        for seed, metric in ((0, 0.90), (1, 0.92))
    ]
    [comparison] = results.compare(records)
    rows = rows_of(comparison)
    # 6 over 1.25 seconds; one seed alone 6 over 1.5, and 5 over 1.
    assert rows[OURS].ratio == pytest.approx(4.8)
    assert rows[OURS].error == pytest.approx(0.5)
    assert rows[OURS].claim == "more"
    # With Adam as the rival SGD does not count.
    [comparison] = results.compare(records, "adam")
    assert rows_of(comparison)[OURS].ratio == pytest.approx(0.3)


def test_defaults_are_timed_on_the_machine_of_the_baseline() -> None:
    """Other commands trained seed 0 of `KFAC()`, and SGD."""
    records = [
        record("adam", 0, (20.0, 0.90)),
        record("adam", 1, (20.0, 0.92)),
        record("sgd", 0, (3.0, 0.90), (16.0, 0.80)),
        record("sgd", 1, (3.0, 0.92), (16.0, 0.80)),
        record("kfac", 0, (2.0, 0.95)),
        record("kfac", 1, (6.0, 0.92)),
    ]
    for index in (2, 3, 4):
        records[index]["environment"] = 1
    [comparison] = results.compare(records)
    # Means of both seeds would be 4 over 20 seconds, SGD's time 3 seconds.
    assert rows_of(comparison)["kfac"].ratio == pytest.approx(6 / 20)
    assert rows_of(comparison)["kfac"].claim == "tie"  # a single seed
    records[2]["environment"] = records[3]["environment"] = 0
    [comparison] = results.compare(records)
    assert rows_of(comparison)["kfac"].ratio == pytest.approx(6 / 3)
    # Seed 0 of K-FAC is not compared with a baseline trained beside `KFAC()`.
    records += [
        record(OURS, 0, (5.0, 0.90)) | {"environment": 2},
        record(OURS, 1, (8.0, 0.92)) | {"environment": 2},
    ]
    del records[2:4]
    records[0]["environment"] = 1
    records[3]["environment"] = 1
    records[1]["environment"] = 3
    [comparison] = results.compare(records)
    assert rows_of(comparison)[OURS].ratio == pytest.approx(8 / 20)
    records[0]["environment"] = records[1]["environment"] = 2
    [comparison] = results.compare(records)
    assert rows_of(comparison)["kfac"].claim == ""


def test_defaults_are_compared_over_their_own_seeds() -> None:
    """Means of the baseline: 0.92 over two seeds, 0.9 over three."""
    records = ends("adam", 2.0, 0.91, 0.93, 0.86)
    records += ends("kfac", 1.0, 0.95, 0.97)
    records += ends("kfac:epochs=0.5", 1.0, 0.99)
    for ours in records[3:]:
        ours["environment"] = 1  # another command: no times
    records[-1]["run"]["share"] = 0.5
    [comparison] = results.compare(records)
    rows = rows_of(comparison)
    assert rows["kfac:epochs=0.5"].end == "tie"  # a single seed
    assert (rows["kfac"].end, rows["kfac"].claim) == ("less", "")
    assert results.geometric_means([comparison]) == {}
    columns, [line] = report.summary(records)
    assert columns[3:] == [
        "`KFAC()`: final result",
        "`KFAC()`, epochs=0.5: final result",
    ]
    assert line[1] == "3, 360"
    assert line[2:4] == ["Adam: 0.9 ± 0.036", "0.96 ± 0.014, **better**"]
    assert line[4] == "0.99, level"
    columns, [row, _] = report.full_table([comparison])
    assert columns[2:] == ["`KFAC()`", "`KFAC()`, 0.5 of the epochs"]
    assert row[2:] == line[3:]
    sentence = report.headline(records)
    assert "best of 1 tuned baseline on **1 of 1 problems**" in sentence
    assert "level on 0, worse on 0. In half of Adam's epochs it" in sentence
    assert sentence.endswith("better than tuned Adam on 0 of 1.")
    first = [r for r in records if r["run"]["seed"] == 0]
    assert "counts as level: cnn." in report.headline(first)
    assert "seconds" not in sentence


def test_defaults_have_times_if_they_ran_with_the_baselines() -> None:
    """Seeds 0 and 1: Adam's mean of 0.92 after 2 s, ours of 0.95 after 1 s."""
    records = ends("adam", 2.0, 0.91, 0.93, 0.86)
    records += [
        record("kfac", seed, (0.5, 0.5), (1.0, metric))
        for seed, metric in enumerate((0.94, 0.96))
    ]
    columns, [line] = report.summary(records)
    assert columns[3:] == [
        "`KFAC()`: time to Adam's result (Adam = 1)",
        "`KFAC()`: time to the best baseline's result",
        "`KFAC()`: final result",
    ]
    assert line[3:5] == ["0.50", "0.50"]
    words = "**0.50 of Adam's processor seconds** (geometric mean of 1"
    assert words in report.headline(records)


def test_the_sentence_on_muon() -> None:
    """Losses of the tiny problem: Muon 0.2 after 2 s, ours 0.3 after 3 s."""
    records = ends("muon", 1.0, 0.80, 0.82) + ends("adam", 1.0, 0.9, 0.92)
    records += ends("kfac", 1.0, 0.70, 0.71)
    records += [
        record(method, 0, end, size="tiny") | {"validation": 0.5}
        for method, end in (("muon", (2.0, 0.2)), ("kfac", (3.0, 0.3)))
    ]
    sentence = report.against_muon(records)
    assert "Worse: cnn (0.705 ± 0.0071; Muon: 0.81 ± 0.014)." in sentence
    assert "higher on: cnn (0.3; Muon: 0.2)." in sentence
    assert "1.5 times Muon's processor seconds" in sentence


def test_losing_rows_stay() -> None:
    records = cnn_records()
    records[-2:] = [
        record(OURS, seed, (4.0, 0.5), (5.0, 0.90 + seed / 100))
        for seed in (0, 1)
    ]
    [comparison] = results.compare(records)
    row = rows_of(comparison)[OURS]
    assert (row.claim, row.ratio) == ("not reached", None)
    assert results.geometric_means([comparison]) == {}
    columns, [line, _] = report.full_table([comparison])
    assert columns == ["problem", "SGD", "Adam", "natural-gradient steps"]
    assert line[2:] == [
        "**0.91 ± 0.014**",
        "0.905 ± 0.0071, level; not reached",
    ]


def test_a_claim_needs_all_seeds() -> None:
    """Without the second one K-FAC does not come to the target."""
    records = cnn_records()
    records[-2] = record(OURS, 0, (4.0, 0.5), (5.0, 0.7), (6.0, 0.89))
    records[-1] = record(OURS, 1, (4.0, 0.5), (5.0, 0.8), (6.0, 0.99))
    [comparison] = results.compare(records)
    row = rows_of(comparison)[OURS]
    assert row.ratio == pytest.approx(0.3)
    assert (row.error, row.claim) == (float("inf"), "tie")


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


def test_the_longest_training_counts_at_equal_seconds() -> None:
    """`KFAC()` ends at 0.95 in 4 s, Muon at 0.91 in 2 s and 0.99 in 4 s."""
    records = ends("kfac", 4.0, 0.94, 0.96) + ends("muon", 2.0, 0.90, 0.92)
    longer = ends("muon", 4.0, 0.98, 1.0)
    for one in longer:
        one["run"] |= {"share": 2.0, "rate": 0.01}
    pairs = list(report.equal_seconds([*longer, *records]))
    assert [pair.end for pair in pairs] == ["less", "more"]
    _, rows = report.equal_table(pairs)
    assert [row[1:] for row in rows] == [
        ["`KFAC()`", "3, 360", "4", "0.95 ± 0.014", ""],
        ["Muon", "3, 360", "2", "0.91 ± 0.014", "**better**"],
        ["Muon (0.01)", "6, 720", "4", "0.99 ± 0.014", "worse"],
    ]
    sentence = report.equal_headline(pairs)
    assert "baseline on **0 of 1 problems**, level on 0, worse on 1" in sentence
    assert "not run: autoencoder, mlp, resnet20" in sentence


def test_the_cost_of_a_training() -> None:
    """Three seconds of `KFAC()` to two of Adam, in one command."""
    records = ends("kfac", 3.0, 0.9, 0.9) + ends("adam", 2.0, 0.9, 0.9)
    for one in records:
        one["run"]["size"] = "full"
    assert "cost 1.5 to 1.5 times" in report.cost(records)
