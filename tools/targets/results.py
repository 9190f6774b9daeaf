"""Seconds to a target, and what may be claimed of them."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from targets.problems import BASELINES, PROBLEMS
from targets.run import Run, parse_method
from targets.study import Record

# A claim takes a mean difference of so many standard errors.
SIGMAS = 3.0
QUANTITIES = ("step", "samples", "seconds", "cpu_seconds")

# What is measured of one evaluation: the quantities, and the metric.
Point = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method with a learning rate and a schedule, with all of its seeds."""

    method: str
    rate: float | None
    length: str
    curves: Mapping[int, Sequence[Point]]
    first_steps: Sequence[float]

    @property
    def finals(self) -> list[float]:
        """The metric at the end, by seed."""
        return [curve[-1]["metric"] for curve in self.curves.values()]

    @property
    def is_baseline(self) -> bool:
        """Whether it is not one of ours."""
        return parse_method(self.method).name in BASELINES


@dataclasses.dataclass(frozen=True)
class Row:
    """How a setting comes to the target.

    Attributes:
        setting: The setting.
        reached: For each seed the first point at the target or beyond, None
            where there is none.
        ratio: Processor seconds over those of the best baseline, by seed;
            empty if a seed does not reach the target.
        verdict: "faster" or "slower" than the fastest baseline, "open" where
            the seeds do not tell, "not reached", or "" for a baseline.
    """

    setting: Setting
    reached: Sequence[Point | None]
    ratio: Sequence[float]
    verdict: str = ""

    @property
    def arrives(self) -> bool:
        """Whether all seeds reach the target."""
        return None not in self.reached

    def values(self, quantity: str) -> list[float]:
        """What it took the seeds that have reached the target."""
        return [point[quantity] for point in self.reached if point]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All methods on one problem, at one size, on one data set.

    Attributes:
        problem: Name of the problem.
        size: Its size.
        data: What it was trained on.
        threads: Threads of a process.
        seeds: The seeds that all settings have.
        targets: The best baseline's final metric with each of these.
        best: The best baseline.
        rows: For each method and length, that with the best learning rate.
        incomplete: Number of settings that lack a seed; they are left out.
        edges: For each method the smallest and the largest learning rate, if
            there are several.
    """

    problem: str
    size: str
    data: str
    threads: int
    seeds: Sequence[int]
    targets: Sequence[float]
    best: Setting
    rows: Sequence[Row]
    incomplete: int
    edges: Mapping[str, Sequence[float]]

    @property
    def title(self) -> str:
        """What is compared."""
        threads = f", {self.threads} threads" * (self.threads > 1)
        return f"{self.problem} ({self.size}, {self.data}{threads})"


def compare(records: Iterable[Record]) -> Iterator[Comparison]:
    """Yields the comparison of each problem that has a baseline."""
    groups: dict[tuple[str, str, str, int], list[Record]] = defaultdict(list)
    for record in records:
        run = Run(**record["run"])
        key = run.problem, run.size, run.data, run.threads
        groups[key].append(record)
    for key, group in groups.items():
        settings = _settings(group)
        seeds = sorted({seed for s in settings for seed in s.curves})
        whole = [s for s in settings if len(s.curves) == len(seeds)]
        baselines = [
            s
            for s in whole
            if s.is_baseline and math.isfinite(_loss(key[0], s))
        ]
        if baselines:
            best = min(baselines, key=lambda s: _loss(key[0], s))
            yield Comparison(
                *key,
                seeds,
                best.finals,
                best,
                _judged_rows(key[0], whole, best),
                len(settings) - len(whole),
                _edges(settings),
            )


def _judged_rows(
    problem: str, settings: Sequence[Setting], best: Setting
) -> list[Row]:
    """For each method and length the row of the best learning rate."""
    rows = [_row(problem, setting, best) for setting in settings]
    fastest = min(
        (row for row in rows if row.setting.is_baseline and row.arrives),
        key=_processor_seconds,
    )
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        name = row.setting.method, row.setting.length
        known = chosen.get(name)
        if known is None or _order(problem, row) < _order(problem, known):
            chosen[name] = row
    return [
        row
        if row.setting.is_baseline
        else dataclasses.replace(row, verdict=_verdict(row, fastest))
        for row in chosen.values()
    ]


def _edges(settings: Sequence[Setting]) -> dict[str, Sequence[float]]:
    rates: dict[str, set[float]] = defaultdict(set)
    for setting in settings:
        if setting.rate is not None:
            rates[setting.method].add(setting.rate)
    return {
        method: (min(found), max(found)) if len(found) > 1 else ()
        for method, found in rates.items()
    }


def _settings(records: Sequence[Record]) -> list[Setting]:
    """Groups the records of a problem; curves are in the order of seeds."""
    groups: dict[tuple[str, float | None, str], list[Record]]
    groups = defaultdict(list)
    for record in sorted(records, key=lambda r: r["run"]["seed"]):
        run = record["run"]
        groups[run["method"], run["rate"], run["length"]].append(record)
    return [
        Setting(
            *key,
            {record["run"]["seed"]: record["curve"] for record in group},
            [record["first_step"]["cpu_seconds"] for record in group],
        )
        for key, group in groups.items()
    ]


def _row(problem: str, setting: Setting, best: Setting) -> Row:
    reached = [
        first_at(problem, curve, target)
        for curve, target in zip(
            setting.curves.values(), best.finals, strict=True
        )
    ]
    bases = [
        first_at(problem, curve, curve[-1]["metric"])
        for curve in best.curves.values()
    ]
    ratio = [
        point["cpu_seconds"] / base["cpu_seconds"]
        for point, base in zip(reached, bases, strict=True)
        if point and base
    ]
    return Row(setting, reached, ratio if None not in reached else [])


def best_rates(runs: Sequence[Run], records: Iterable[Record]) -> list[Run]:
    """Of each problem, method and length the run that ends best.

    Args:
        runs: Runs of one seed.
        records: Their results; one that has none is not chosen.
    """
    best: dict[tuple[str, str, str], tuple[float, Run]] = {}
    finals = {
        Run(**record["run"]): record["curve"][-1]["metric"]
        for record in records
    }
    for run in runs:
        name = run.problem, run.method, run.length
        loss = _loss_of(run.problem, finals.get(run, math.nan))
        if name not in best or loss < best[name][0]:
            best[name] = loss, run
    return [run for loss, run in best.values() if math.isfinite(loss)]


def first_at(
    problem: str, curve: Sequence[Point], target: float
) -> Point | None:
    """The first point at a target or beyond it."""
    higher = PROBLEMS[problem].higher_is_better
    for point in curve:
        metric = point["metric"]
        if metric >= target if higher else metric <= target:
            return point
    return None


def _loss(problem: str, setting: Setting) -> float:
    return _loss_of(problem, statistics.fmean(setting.finals))


def _loss_of(problem: str, metric: float) -> float:
    """The smaller the better; what is not finite is the worst."""
    if not math.isfinite(metric):
        return math.inf
    return -metric if PROBLEMS[problem].higher_is_better else metric


def _order(problem: str, row: Row) -> tuple[bool, float]:
    """What makes one learning rate better than another."""
    if row.arrives:
        return False, _processor_seconds(row)
    return True, _loss(problem, row.setting)


def _processor_seconds(row: Row) -> float:
    return statistics.fmean(row.values("cpu_seconds"))


def _verdict(row: Row, fastest: Row) -> str:
    if not row.arrives:
        return "not reached"
    pairs = zip(
        fastest.values("cpu_seconds"), row.values("cpu_seconds"), strict=True
    )
    return judge([theirs - ours for theirs, ours in pairs])


def judge(gains: Sequence[float]) -> str:
    """What may be claimed of differences, one for each seed.

    Returns:
        "faster" or "slower" where (mean difference) * sqrt(n) is at least
        three standard deviations, else "open".
    """
    if len(gains) < 2:
        return "open"
    mean, deviation = statistics.fmean(gains), statistics.stdev(gains)
    if abs(mean) * math.sqrt(len(gains)) < SIGMAS * deviation or mean == 0:
        return "open"
    return "faster" if mean > 0 else "slower"


def geometric_means(
    comparisons: Sequence[Comparison],
) -> Iterator[tuple[str, str, float, int]]:
    """Yields method, length, mean ratio and in how many problems, of ours."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for comparison in comparisons:
        for row in comparison.rows:
            if row.ratio and not row.setting.is_baseline:
                name = row.setting.method, row.setting.length
                ratios[name].append(statistics.fmean(row.ratio))
    for (method, length), found in ratios.items():
        yield method, length, statistics.geometric_mean(found), len(found)
