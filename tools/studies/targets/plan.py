"""The trainings of a study, stage by stage.

For tiny problems all rates are trained with all seeds. Otherwise settings are
searched on held-out training data: the grid, rates beyond the grid while the
best rate is at its edge, then weight decays. Settings searched with small
models are searched again at full size: half and double of the best rate until
the best rate is between two other rates; for K-FAC, which keeps its rate, all
batches and lengths. The best setting is trained with all training data and
measured with the test set.

The setting of K-FAC is the quickest with the final held-out loss of the best
baseline, or less.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from targets.methods import (
    Grid,
    follows_adam,
    grid_of,
    is_baseline,
    is_untuned,
)
from targets.problems import TINY, Problem, problems_of
from targets.results import finals, loss_of, seconds_of, settings_of
from targets.run import FINAL, SEARCH, Run
from targets.study import Record

MAX_BEYOND = 3  # rates beyond those of the grid
SEARCH_SEED = 0
# Among settings with errors within 1 % of the best, choose the quickest.
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Plan:
    """The trainings of a study.

    Attributes:
        size: Size of the problems.
        search_size: Size at which settings are searched.
        data: Name of the data, by problem.
        methods: The methods.
        seeds: Seeds of the final trainings.
        grid: Values that replace those of each method's grid; "batches"
            replaces those of the problems.
    """

    size: str
    search_size: str
    data: Mapping[str, str]
    methods: Sequence[str]
    seeds: Sequence[int]
    grid: Mapping[str, Any]

    def stages(self, records: Sequence[Record]) -> Iterator[list[Run]]:
        """Yield the trainings of each stage.

        The caller adds the records of a stage to `records` before it requests
        the next stage.
        """
        searched = self._searched_methods
        followers = [name for name in searched if follows_adam(name)]
        others = [name for name in searched if name not in followers]
        for methods in (others, followers):
            yield list(self._grids(methods, records))
            for _ in range(MAX_BEYOND):
                yield list(self._beyond(methods, records))
            if self.size != TINY:
                yield list(self._decays(methods, records))
        if self.size == TINY:
            return
        if self.search_size != self.size:
            for _ in range(1 + MAX_BEYOND):
                yield list(self._full_size(records))
        yield list(self._finals(records))

    def _grids(
        self, methods: Sequence[str], records: Sequence[Record]
    ) -> Iterator[Run]:
        """Yield all rates with all batches."""
        tiny = self.size == TINY
        for problem, method in self._pairs(methods):
            rest, batches = None, self._batches(problem)
            grid, untuned = self._grid(problem, method), is_untuned(method)
            if follows_adam(method):
                adam = self.chosen(problem, "adam", records)
                if adam is None:
                    continue
                if untuned:
                    batches = (adam.batch,)
                else:
                    rest = adam.rate
            for seed, share, rate, batch in itertools.product(
                self._first_seeds,
                (1.0,) if tiny and not untuned else grid.shares,
                grid.rates,
                batches,
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
        """Yield a rate beyond the grid if the best rate is at its edge."""
        for problem, method in self._pairs(methods):
            best = self.chosen(problem, method, records)
            if best is None or best.rate is None:
                continue
            searched = self._searched(problem, method, records)
            runs = (Run(**record["run"]) for record in searched)
            rates = sorted(
                {
                    run.rate
                    for run in runs
                    if run.rate
                    and dataclasses.replace(run, rate=best.rate).setting == best
                }
            )
            if len(rates) < 2:
                continue
            for edge, inside in (rates[:2], rates[:-3:-1]):
                for seed in self._first_seeds if edge == best.rate else ():
                    beyond = float(f"{edge * edge / inside:.3g}")
                    yield dataclasses.replace(best, rate=beyond, seed=seed)

    def _decays(
        self, methods: Sequence[str], records: Sequence[Record]
    ) -> Iterator[Run]:
        """Yield the best setting with each other weight decay."""
        for problem, method in self._pairs(methods):
            first, *others = self._grid(problem, method).decays
            if best := self.chosen(problem, method, records, first):
                for decay in others:
                    yield dataclasses.replace(
                        best, decay=decay, seed=SEARCH_SEED
                    )

    def _full_size(self, records: Sequence[Record]) -> Iterator[Run]:
        """Yield the search at full size: rates, or batches and lengths."""
        for problem, method in self._pairs(self._searched_methods):
            best = self.final(problem, method, records)
            if best is None:
                continue
            changes: list[dict[str, Any]] = [
                {"rate": factor * (best.rate or 0.0)} for factor in (1, 0.5, 2)
            ]
            if best.rate is None:
                changes = [
                    {"share": share, "batch": batch}
                    for share in self._grid(problem, method).shares
                    for batch in self._batches(problem)
                ]
            for change in changes:
                yield dataclasses.replace(best, seed=SEARCH_SEED, **change)

    def _finals(self, records: Sequence[Record]) -> Iterator[Run]:
        """Yield the best setting of each method with each seed."""
        for seed in self.seeds:
            for problem, method in self._pairs(self.methods):
                if best := self.final(problem, method, records):
                    yield dataclasses.replace(best, phase=FINAL, seed=seed)

    def final(
        self, problem: str, method: str, records: Sequence[Record]
    ) -> Run | None:
        """Return the best setting after the repeated search at full size."""
        if is_untuned(method) and self.size != TINY:
            adam = self.final(problem, "adam", records)
            (share,) = self._grid(problem, method).shares
            return adam and dataclasses.replace(
                adam, method=method, rate=None, decay=0.0, share=share
            )
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
        """Return the best setting of a method; None if there is none yet.

        If `decay` is not None, only settings with this decay count. `size` is
        the size of the search; None is `search_size`.
        """
        candidates = [
            record
            for record in self._searched(problem, method, records, size)
            if decay in (None, record["run"]["decay"])
        ]
        if self.size == TINY or is_baseline(method):
            return best_setting(candidates)
        baselines = filter(is_baseline, {r["run"]["method"] for r in records})
        ends = [
            loss
            for name in baselines
            for loss in losses_of(
                self._searched(problem, name, records, size)
            ).values()
        ]
        return best_setting(candidates, min(ends, default=None))

    def _searched(
        self,
        problem: str,
        method: str,
        records: Sequence[Record],
        size: str | None = None,
    ) -> Iterator[Record]:
        """Yield the records from which the setting of a method is chosen."""
        expected = {
            "problem": problem,
            "method": method,
            "size": size or self.search_size,
            "data": self.data[problem],
        }
        if self.size != TINY:
            expected["phase"] = SEARCH
        for record in records:
            if expected.items() <= record["run"].items():
                yield record

    @property
    def _searched_methods(self) -> list[str]:
        """Methods whose settings are searched: all, for tiny problems."""
        tiny = self.size == TINY
        return [name for name in self.methods if tiny or not is_untuned(name)]

    @property
    def _first_seeds(self) -> Sequence[int]:
        """Seeds with which the settings of the search are trained."""
        return self.seeds if self.size == TINY else (SEARCH_SEED,)

    def _pairs(self, methods: Sequence[str]) -> Iterator[tuple[str, str]]:
        return itertools.product(self.data, methods)

    def _problem(self, name: str) -> Problem:
        return problems_of(self.size)[name]

    def _batches(self, problem: str) -> Sequence[int]:
        return self.grid.get("batches", self._problem(problem).batches)

    def _grid(self, problem: str, method: str) -> Grid:
        grid = grid_of(method, self._problem(problem))
        changes = {k: v for k, v in self.grid.items() if k in grid._fields}
        if grid.rates == (None,):  # the default rate only
            changes.pop("rates", None)
        return grid._replace(**changes)


def best_setting(
    records: Iterable[Record], target: float | None = None
) -> Run | None:
    """Return the best setting, without a seed.

    This is the quickest setting with a loss of at most `target`, or within 1 %
    of the lowest loss. For tiny problems it has the lowest loss.
    """
    settings = settings_of(records)
    losses = losses_of(
        record for group in settings.values() for record in group
    )
    if not losses:
        return None
    best = min(losses, key=lambda run: losses[run])
    if best.size == TINY:
        return best
    bound = max((1 + TOLERANCE) * losses[best], target or 0.0)
    level = [run for run in losses if losses[run] <= bound]
    return min(level or [best], key=lambda run: seconds_of(settings[run]))


def losses_of(records: Iterable[Record]) -> dict[Run, float]:
    """Return the mean loss at the end, by setting."""
    return {
        run: statistics.fmean(loss_of(run, end) for end in finals(group))
        for run, group in settings_of(records).items()
    }
