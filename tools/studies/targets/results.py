"""Comparisons of trainings, with their claims."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from targets.methods import is_baseline, is_untuned
from targets.problems import TINY
from targets.run import FINAL, Run
from targets.study import Record

SIGMAS = 3.0  # standard errors above which a difference is claimed
TIE = "tie"


def settings_of(records: Iterable[Record]) -> dict[Run, list[Record]]:
    """Return records by setting, in the order of their seeds."""
    groups: dict[Run, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r["run"]["seed"]):
        groups[Run(**record["run"]).setting].append(record)
    return groups


def loss_of(run: Run, metric: float | None) -> float:
    """Return the metric, or the error for an accuracy."""
    if metric is None or not math.isfinite(metric):
        return math.inf
    return 1 - metric if run.row.higher_is_better else metric


def finals(records: Sequence[Record]) -> list[float | None]:
    """Return the final metrics, by seed."""
    return [record["curve"]["metric"][-1] for record in records]


def seconds_of(records: Sequence[Record]) -> float:
    """Return the mean processor seconds of a training."""
    return statistics.fmean(r["curve"]["cpu_seconds"][-1] for r in records)


def of_one_command(
    records: Sequence[Record], methods: Sequence[str]
) -> list[Record]:
    """Return the trainings of commands that trained all methods.

    Their processor seconds are comparable.
    """
    commands = set.intersection(
        *(
            {r["environment"] for r in records if r["run"]["method"] == m}
            for m in methods
        )
    )
    return [r for r in records if r["environment"] in commands]


def judge(differences: Sequence[float]) -> str:
    """Judge if the differences, one for each seed, are significant.

    Returns:
        "less" or "more" if (mean difference) * sqrt(n) is at least three
        standard deviations, else "tie".
    """
    if len(differences) < 2:
        return TIE
    if math.inf in differences:
        return "more"
    mean = statistics.fmean(differences)
    bound = SIGMAS * statistics.stdev(differences)
    if abs(mean) * math.sqrt(len(differences)) < bound or not mean:
        return TIE
    return "less" if mean < 0 else "more"


# ------------------------------------------------------------ time to a target
@dataclasses.dataclass(frozen=True)
class Row:
    """Comparison of a method with the best baseline on a problem.

    Attributes:
        setting: Its setting.
        finals: Its final metrics, by seed.
        ratio: Processor seconds until the mean of the seeds reaches the target,
            over the seconds of the first baseline that reaches it; None if the
            target is never reached. Only seeds and baselines with comparable
            times count, see `_comparable`.
        error: Standard error of the ratio, by the jackknife over the seeds;
            infinite if the target is not reached without some seed.
        claim: "less" or "more" seconds than that baseline, "tie", "not
            reached"; "" for a baseline, and for `KFAC()` if no seed was trained
            by the command that trained the best baseline.
        end: "less" or "more" final loss than the target, or "tie".
    """

    setting: Run
    finals: Sequence[float | None]
    ratio: float | None
    error: float
    claim: str
    end: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All methods on a problem, at one size, on one data set.

    Attributes:
        best: The best baseline: its mean final metric is the target.
        rows: All methods that have all seeds, and `KFAC()` with some, which
            are compared with the same seeds of the best baseline.
    """

    best: Row
    rows: Sequence[Row]


def compare(
    records: Iterable[Record], rival: str | None = None
) -> Iterator[Comparison]:
    """Yield the comparison with all baselines, or with `rival` only."""
    problems: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        run = record["run"]
        if run["phase"] == FINAL and run["size"] != TINY:
            problems[run["problem"], run["size"], run["data"]].append(record)
    for group in problems.values():
        seeds = sorted({record["run"]["seed"] for record in group})
        settings = {
            setting: found
            for setting, found in settings_of(group).items()
            if len(found) == len(seeds) or is_untuned(setting.method)
        }
        rivals = [
            setting
            for setting in settings
            if is_baseline(setting.method) and rival in (None, setting.method)
        ]
        ends = {run: mean_curve(run, settings[run])[-1][1] for run in rivals}
        if ends and min(ends.values()) < math.inf:
            best = min(ends, key=lambda run: ends[run])
            rows = {run: _row(settings, run, best, rivals) for run in settings}
            yield Comparison(rows[best], [*rows.values()])


def mean_curve(
    run: Run, records: Sequence[Record]
) -> list[tuple[float, float]]:
    """Return processor seconds and loss, means over the seeds."""
    curves = [record["curve"] for record in records]
    seconds = zip(*(curve["cpu_seconds"] for curve in curves), strict=True)
    losses = zip(
        *([loss_of(run, m) for m in curve["metric"]] for curve in curves),
        strict=True,
    )
    means = map(statistics.fmean, seconds), map(statistics.fmean, losses)
    return list(zip(*means, strict=True))


def _row(
    settings: Mapping[Run, Sequence[Record]],
    setting: Run,
    best: Run,
    rivals: Sequence[Run],
) -> Row:
    """Compare a setting with the baselines `rivals`."""
    by_seed = {
        run: {record["run"]["seed"]: record for record in settings[run]}
        for run in {setting, best, *rivals}
    }
    with_kfac = {
        record["environment"]
        for run in settings
        if is_untuned(run.method)
        for record in settings[run]
    }
    timed, rivals = _comparable(by_seed, setting, best, rivals, with_kfac)
    ratio, error = math.inf, math.inf
    if timed:
        ratio, error = _time_ratio(by_seed, setting, best, rivals, timed)
    claim = TIE
    if abs(ratio - 1) >= SIGMAS * error:
        claim = "less" if ratio < 1 else "more"
    if math.isinf(ratio):
        claim = "not reached"
    if is_baseline(setting.method) or not timed:
        claim = ""

    def end(run: Run, seed: int) -> float:
        return loss_of(run, by_seed[run][seed]["curve"]["metric"][-1])

    return Row(
        setting,
        finals(settings[setting]),
        None if math.isinf(ratio) else ratio,
        error,
        claim,
        judge([end(setting, s) - end(best, s) for s in by_seed[setting]]),
    )


def _comparable(
    records: Mapping[Run, Mapping[int, Record]],
    setting: Run,
    best: Run,
    rivals: Sequence[Run],
    with_kfac: Set[int],
) -> tuple[list[int], list[Run]]:
    """Return the seeds and baselines whose times are compared with `setting`.

    Times of one command are comparable: machine and load are the same. Tuned
    K-FAC is also compared with other commands, but not with those that trained
    `KFAC()`, `with_kfac`.
    """

    def is_comparable(run: Run, seed: int) -> bool:
        command = records[run][seed]["environment"]
        if command == records[setting][seed]["environment"]:
            return True
        return not is_untuned(setting.method) and command not in with_kfac

    seeds = [seed for seed in records[setting] if is_comparable(best, seed)]
    comparable = [
        run for run in rivals if all(is_comparable(run, s) for s in seeds)
    ]
    return seeds, comparable


def _time_ratio(
    records: Mapping[Run, Mapping[int, Record]],
    setting: Run,
    best: Run,
    rivals: Sequence[Run],
    seeds: Sequence[int],
) -> tuple[float, float]:
    """Return the ratio of times and its standard error, see `Row`.

    The ratio is infinite if the target is never reached.
    """

    def ratio(excluded_seed: int | None) -> float:
        kept = [seed for seed in seeds if seed != excluded_seed]
        curves = {
            run: mean_curve(run, [records[run][seed] for seed in kept])
            for run in {setting, best, *rivals}
        }
        target = curves[best][-1][1]
        times = {
            run: next((s for s, loss in curve if loss <= target), math.inf)
            for run, curve in curves.items()
        }
        return times[setting] / min(times[run] for run in rivals)

    result, count = ratio(None), len(seeds)
    ratios = [ratio(seed) for seed in seeds] if count > 1 else [math.inf]
    if math.inf in ratios:
        return result, math.inf
    mean = statistics.fmean(ratios)
    squares = sum((value - mean) ** 2 for value in ratios)
    return result, math.sqrt((count - 1) / count * squares)


def geometric_means(
    comparisons: Sequence[Comparison],
) -> dict[str, tuple[float, int]]:
    """Return the mean ratio and the number of problems of each method."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for comparison in comparisons:
        for row in comparison.rows:
            if row.ratio and row.claim:
                ratios[row.setting.method].append(row.ratio)
    return {
        method: (statistics.geometric_mean(found), len(found))
        for method, found in ratios.items()
    }
