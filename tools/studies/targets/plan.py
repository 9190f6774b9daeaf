"""Which trainings there are, a stage after the other.

Of tiny problems all rates are trained with all seeds. Of the others settings
are searched with a part of the training data, and what was best is trained
again, with all of them, and measured with the test set. Where the best rate is
the smallest or the largest, the one beyond it is tried, too. Settings searched
with small models are searched again about the best one with those that are
measured, for wider models that train longer want other rates. K-FAC, which
keeps its rate, tries all batches and lengths again.

Of K-FAC the setting is taken that is the first to end, with the data that were
held out, as well as the best baseline does.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from targets.methods import Grid, follows_adam, grid_of, is_baseline
from targets.problems import TINY, problem_of
from targets.results import finals, loss_of, seconds_of, settings_of
from targets.run import FINAL, SEARCH, Run
from targets.study import Record

# Rates at most that are tried beyond those of the grid.
MOST_BEYOND = 3
# Settings whose errors are within so much of the least are equally good: the
# quickest of them is taken.
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a study is asked for.

    Attributes:
        size: Size of the problems.
        search_size: Size that settings are searched at.
        data: What each problem is trained on, by its name.
        methods: The methods.
        seeds: Seeds of what is measured.
        search_seeds: Seeds of what is searched.
        grid: What replaces parts of each method's grid; "batches" that of the
            problems.
    """

    size: str
    search_size: str
    data: Mapping[str, str]
    methods: Sequence[str]
    seeds: Sequence[int]
    search_seeds: Sequence[int]
    grid: Mapping[str, Any]

    def stages(self, records: Sequence[Record]) -> Iterator[list[Run]]:
        """Yields what is trained one after the other.

        Args:
            records: All records, to which those of a stage are added before
                the next one is asked for.
        """
        followers = [name for name in self.methods if follows_adam(name)]
        others = [name for name in self.methods if name not in followers]
        for methods in (others, followers):
            yield list(self._grids(methods, records))
            for _ in range(MOST_BEYOND):
                yield list(self._beyond(methods, records))
            if self.size != TINY:
                yield list(self._decays(methods, records))
        if self.size == TINY:
            return
        if self.search_size != self.size:
            for _ in range(1 + MOST_BEYOND):
                yield list(self._again(records))
        yield list(self._finals(records))

    def _grids(
        self, methods: Sequence[str], records: Sequence[Record]
    ) -> Iterator[Run]:
        """All rates with all batches."""
        tiny = self.size == TINY
        for problem, method in self._pairs(methods):
            rest = None
            if follows_adam(method):
                adam = self.chosen(problem, "adam", records)
                if adam is None:
                    continue
                rest = adam.rate
            row = problem_of(problem, self.size)
            grid = self._grid(problem, method)
            for seed, share, rate, batch in itertools.product(
                self._first_seeds,
                (1.0,) if tiny else grid.shares,
                grid.rates,
                self.grid.get("batches", row.batches),
            ):
                yield Run(
                    FINAL if tiny else SEARCH,
                    problem,
                    self.search_size,
                    self.data[problem],
                    method,
                    rate,
                    rest,
                    0.0 if tiny else grid.decays[0],
                    batch,
                    share,
                    seed,
                )

    def _beyond(
        self, methods: Sequence[str], records: Sequence[Record]
    ) -> Iterator[Run]:
        """The rate beyond the best one, where that is the first or the last."""
        for problem, method in self._pairs(methods):
            best = self.chosen(problem, method, records)
            if best is None or best.rate is None:
                continue
            alike = (
                Run(**r["run"])
                for r in self._searched(problem, method, records)
            )
            rates = sorted(
                {
                    run.rate
                    for run in alike
                    if run.rate
                    and dataclasses.replace(run, rate=best.rate).setting == best
                }
            )
            pairs = (rates[:2], rates[:-3:-1]) if len(rates) > 1 else ()
            for edge, inside in pairs:
                for seed in self._first_seeds if edge == best.rate else ():
                    beyond = float(f"{edge * edge / inside:.3g}")
                    yield dataclasses.replace(best, rate=beyond, seed=seed)

    def _decays(
        self, methods: Sequence[str], records: Sequence[Record]
    ) -> Iterator[Run]:
        """The other decays, with what was best with the first one."""
        for problem, method in self._pairs(methods):
            first, *others = self._grid(problem, method).decays
            best = self.chosen(problem, method, records, first)
            if best is None:
                continue
            for seed in self.search_seeds:
                for decay in others:
                    yield dataclasses.replace(best, decay=decay, seed=seed)

    def _again(self, records: Sequence[Record]) -> Iterator[Run]:
        """What is tried again, at the size of the finals.

        The best rate, its half and its double, or all batches and lengths of
        what has but one rate.
        """
        for problem, method in self._pairs(self.methods):
            best = self.final(problem, method, records)
            if best is None:
                continue
            if best.rate is None:
                batches = problem_of(problem, self.size).batches
                others = [
                    {"share": share, "batch": batch}
                    for share in self._grid(problem, method).shares
                    for batch in self.grid.get("batches", batches)
                ]
            else:
                others = [{"rate": f * best.rate} for f in (1, 0.5, 2)]
            for seed, other in itertools.product(self.search_seeds, others):
                yield dataclasses.replace(best, seed=seed, **other)

    def _finals(self, records: Sequence[Record]) -> Iterator[Run]:
        """What was best, a whole seed after the other."""
        for seed in self.seeds:
            for problem, method in self._pairs(self.methods):
                best = self.final(problem, method, records)
                if best:
                    yield dataclasses.replace(best, phase=FINAL, seed=seed)

    def final(
        self, problem: str, method: str, records: Sequence[Record]
    ) -> Run | None:
        """The best setting, as it was tried again at the final size."""
        best = self.chosen(problem, method, records)
        if best is None or self.search_size == self.size:
            return best
        best = dataclasses.replace(best, size=self.size)
        if best.rate is None:
            again = self.chosen(problem, method, records, best.decay, self.size)
            return again or best
        losses = losses_of(
            record
            for record in self._searched(problem, method, records, self.size)
            if Run(**record["run"] | {"rate": best.rate}).setting == best
        )
        return min(losses, key=lambda run: losses[run], default=best)

    def chosen(
        self,
        problem: str,
        method: str,
        records: Sequence[Record],
        decay: float | None = None,
        size: str | None = None,
    ) -> Run | None:
        """The best setting of a method, None if there is none yet.

        Args:
            problem: Name of the problem.
            method: The method.
            records: All records.
            decay: Only settings with this decay.
            size: Size that was searched at, by default that of the search.
        """
        own = [
            record
            for record in self._searched(problem, method, records, size)
            if decay in (None, record["run"]["decay"])
        ]
        if self.size == TINY or is_baseline(method):
            return best_setting(own)
        names = {r["run"]["method"] for r in records}
        others = [
            losses_of(self._searched(problem, name, records, size))
            for name in filter(is_baseline, names)
        ]
        ends = [loss for found in others for loss in found.values()]
        return best_setting(own, min(ends, default=None))

    def _searched(
        self,
        problem: str,
        method: str,
        records: Sequence[Record],
        size: str | None = None,
    ) -> Iterator[Record]:
        """The records of a method that settings are chosen by."""
        for record in records:
            run = Run(**record["run"])
            if (
                (run.problem, run.method) == (problem, method)
                and (run.size, run.data)
                == (size or self.search_size, self.data[problem])
                and (self.size == TINY or run.phase == SEARCH)
            ):
                yield record

    @property
    def _first_seeds(self) -> Sequence[int]:
        """Seeds that all rates are trained with."""
        return self.seeds if self.size == TINY else self.search_seeds

    def _pairs(self, methods: Sequence[str]) -> Iterator[tuple[str, str]]:
        for problem in self.data:
            for method in methods:
                yield problem, method

    def _grid(self, problem: str, method: str) -> Grid:
        own = grid_of(method, problem_of(problem, self.size))
        names = {field.name for field in dataclasses.fields(Grid)}
        if own.rates == (None,):  # nothing that could be searched
            names.remove("rates")
        given = {k: v for k, v in self.grid.items() if k in names}
        return dataclasses.replace(own, **given)


def best_setting(
    records: Iterable[Record], target: float | None = None
) -> Run | None:
    """The setting that ends best, without a seed.

    Of settings that are equally good, or at the target if there is one, the
    quickest; of tiny problems, whose loss at the end is the result, the best.
    """
    records = list(records)
    settings, losses = settings_of(records), losses_of(records)
    if not losses:
        return None
    best = min(losses, key=lambda run: losses[run])
    if best.size == TINY:
        return best
    most = (1 + TOLERANCE) * losses[best]
    if target is not None:
        most = max(most, target)
    good = [run for run in losses if losses[run] <= most]
    return min(good or [best], key=lambda run: seconds_of(settings[run]))


def losses_of(records: Iterable[Record]) -> dict[Run, float]:
    """Mean loss at the end, by setting."""
    return {
        run: statistics.fmean(loss_of(run, end) for end in finals(group))
        for run, group in settings_of(records).items()
    }
