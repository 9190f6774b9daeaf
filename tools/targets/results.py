"""What may be claimed of the trainings."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from targets.methods import is_baseline
from targets.problems import TINY
from targets.run import FINAL, Run
from targets.study import Record

# A claim takes a mean difference of so many standard errors.
SIGMAS = 3.0
TIE = "tie"


def settings_of(records: Iterable[Record]) -> dict[Run, list[Record]]:
    """Records by their setting, in the order of their seeds."""
    groups: dict[Run, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r["run"]["seed"]):
        groups[Run(**record["run"]).setting].append(record)
    return groups


def loss_of(run: Run, metric: float | None) -> float:
    """The smaller the better: errors in place of accuracies."""
    if metric is None or not math.isfinite(metric):
        return math.inf
    return 1 - metric if run.row.higher_is_better else metric


def finals(records: Sequence[Record]) -> list[float | None]:
    """The metric at the end, by seed."""
    return [record["curve"]["metric"][-1] for record in records]


def seconds_of(records: Sequence[Record]) -> float:
    """Processor seconds of a whole training."""
    return statistics.fmean(r["curve"]["cpu_seconds"][-1] for r in records)


def judge(differences: Sequence[float]) -> str:
    """What may be claimed of differences, one for each seed.

    Returns:
        "less" or "more" where (mean difference) * sqrt(n) is at least three
        standard deviations, else "tie".
    """
    if len(differences) < 2:
        return TIE
    if math.inf in differences:
        return "more"
    mean, deviation = (
        statistics.fmean(differences),
        statistics.stdev(differences),
    )
    if abs(mean) * math.sqrt(len(differences)) < SIGMAS * deviation or not mean:
        return TIE
    return "less" if mean < 0 else "more"


# ------------------------------------------------------------ time to a target
@dataclasses.dataclass(frozen=True)
class Row:
    """How a method comes to the target.

    Attributes:
        setting: Its setting.
        finals: Its metric at the end, by seed.
        seconds: Processor seconds to the target, by seed; None where it is not
            reached.
        ratios: These over those of the baseline that is there first; empty if
            a seed does not reach the target.
        claim: "less" or "more" seconds than that baseline, "tie", "not
            reached", or "" for a baseline.
        end: "less" or "more" loss at the end than the target, or "tie".
    """

    setting: Run
    finals: Sequence[float | None]
    seconds: Sequence[float | None]
    ratios: Sequence[float] = ()
    claim: str = ""
    end: str = TIE

    @property
    def arrives(self) -> bool:
        """Whether all seeds reach the target."""
        return None not in self.seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All methods on a problem, at one size, on one data set.

    Attributes:
        best: The baseline that ends best: its metrics are the targets.
        first: The baseline that comes to the targets first.
        rows: All methods that have all seeds.
        seeds: These seeds.
    """

    best: Row
    first: Row
    rows: Sequence[Row]
    seeds: Sequence[int]


def compare(records: Iterable[Record]) -> Iterator[Comparison]:
    """Yields the comparison of each problem that has a baseline."""
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
            if len(found) == len(seeds)
        }
        ends = {
            setting: statistics.fmean(
                loss_of(setting, m) for m in finals(found)
            )
            for setting, found in settings.items()
            if is_baseline(setting.method)
        }
        if not ends or math.inf in (best := min(ends.values()),):
            continue
        [target, *_] = [setting for setting in ends if ends[setting] == best]
        yield _compared(settings, target, seeds)


def _compared(
    settings: Mapping[Run, Sequence[Record]], best: Run, seeds: Sequence[int]
) -> Comparison:
    """The comparison with a best baseline."""
    targets = finals(settings[best])
    rows = {
        setting: Row(
            setting,
            finals(found),
            [
                _seconds_to(setting, record, target)
                for record, target in zip(found, targets, strict=True)
            ],
            end=judge(
                [
                    loss_of(setting, end) - loss_of(best, target)
                    for end, target in zip(finals(found), targets, strict=True)
                ]
            ),
        )
        for setting, found in settings.items()
    }
    first = min(
        (r for s, r in rows.items() if is_baseline(s.method) and r.arrives),
        key=lambda row: statistics.fmean(
            s for s in row.seconds if s is not None
        ),
    )
    return Comparison(
        rows[best], first, [_judged(row, first) for row in rows.values()], seeds
    )


def _seconds_to(run: Run, record: Record, target: float | None) -> float | None:
    """Processor seconds to the first point at the target or beyond."""
    curve = record["curve"]
    for seconds, metric in zip(
        curve["cpu_seconds"], curve["metric"], strict=True
    ):
        if loss_of(run, metric) <= loss_of(run, target):
            return seconds
    return None


def _judged(row: Row, first: Row) -> Row:
    """A row with its ratios, and what may be claimed of it."""
    own = not is_baseline(row.setting.method)
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(row.seconds, first.seconds, strict=True)
        if ours is not None and theirs is not None
    ]
    if len(pairs) < len(row.seconds):
        return dataclasses.replace(row, claim="not reached" if own else "")
    return dataclasses.replace(
        row,
        ratios=[ours / theirs for ours, theirs in pairs],
        claim=judge([a - b for a, b in pairs]) if own else "",
    )


def geometric_means(
    comparisons: Sequence[Comparison],
) -> dict[str, tuple[float, int]]:
    """Mean ratio of each of our methods, and on how many problems it is one."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for comparison in comparisons:
        for row in comparison.rows:
            if row.ratios and not is_baseline(row.setting.method):
                ratios[row.setting.method].append(statistics.fmean(row.ratios))
    return {
        method: (statistics.geometric_mean(found), len(found))
        for method, found in ratios.items()
    }
