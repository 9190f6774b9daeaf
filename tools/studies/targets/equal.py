"""Baselines that train for the processor seconds of `KFAC()`.

Batches, weight decays and first rates are those of docs/trainings.json. First
all methods train for equal epochs, by one command on one machine. Then the
epochs of a baseline are multiplied by the ratio of the processor seconds, and
its rate is searched again on held-out training data.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from targets.methods import KFAC, is_baseline
from targets.plan import SEARCH_SEED, losses_of
from targets.results import of_one_command, seconds_of, settings_of
from targets.run import FINAL, SEARCH, Run
from targets.study import TRAININGS, Record, Records

# A ratio of processor seconds within 10 % of 1 counts as equal.
TOLERANCE = 0.1


def known_settings(
    data: Mapping[str, str], methods: Sequence[str]
) -> Iterator[Run]:
    """Yield the settings of the final trainings, on other data."""
    final = [
        record
        for record in Records(TRAININGS).runs
        if record["run"]["phase"] == FINAL and record["run"]["size"] == "full"
    ]
    for run in settings_of(final):
        if run.problem in data and run.method in methods:
            yield dataclasses.replace(run, data=data[run.problem])


def share_of_epochs(baseline: Run, records: Sequence[Record]) -> float:
    """Return the factor on the epochs that gives the seconds of `KFAC()`.

    It is that of an existing search: more seeds do not change it.

    Raises:
        ValueError: If no command trained both.
    """
    of_problem = [
        record
        for record in records
        if record["run"]["problem"] == baseline.problem
    ]
    for record in of_problem:
        run = Run(**record["run"])
        if (run.phase, run.method) == (SEARCH, baseline.method):
            return run.share
    final = [
        record
        for record in of_problem
        if record["run"]["phase"] == FINAL and record["run"]["share"] == 1
    ]
    pair = KFAC, baseline.method
    timed = of_one_command(final, pair)
    groups = [[r for r in timed if r["run"]["method"] == m] for m in pair]
    if not all(groups):
        raise ValueError(
            f"{baseline.problem}: no command trained both {KFAC} and "
            f"{baseline.method}: seconds are not comparable"
        )
    return float(f"{seconds_of(groups[0]) / seconds_of(groups[1]):.3g}")


@dataclasses.dataclass(frozen=True)
class EqualSeconds:
    """The trainings of some seeds.

    Attributes:
        settings: `KFAC()` and baselines at equal epochs.
        seeds: Seeds, which have chosen nothing.
    """

    settings: Sequence[Run]
    seeds: Sequence[int]

    def stages(self, records: Sequence[Record]) -> Iterator[list[Run]]:
        """Yield the trainings of each stage, see `Plan.stages`."""
        for run in self.settings:
            yield self._with_seeds(run)
        for run in self.settings:
            if not is_baseline(run.method):
                continue
            share = share_of_epochs(run, records)
            if abs(share - 1) > TOLERANCE:
                run = dataclasses.replace(run, share=share)
                yield from self._of_equal_seconds(run, records)

    def _of_equal_seconds(
        self, run: Run, records: Sequence[Record]
    ) -> Iterator[list[Run]]:
        """Yield the search of a rate, and the trainings with the best rate."""
        best = dataclasses.replace(run, phase=SEARCH, seed=SEARCH_SEED)
        before = None
        while best != before:
            before, rate = best, best.rate or 0.0
            near = [
                dataclasses.replace(best, rate=factor * rate)
                for factor in (1, 0.5, 2)
            ]
            yield near
            losses = losses_of(records)
            best = min(near, key=lambda run: losses[run.setting])
        yield self._with_seeds(dataclasses.replace(best, phase=FINAL))

    def _with_seeds(self, run: Run) -> list[Run]:
        return [dataclasses.replace(run, seed=seed) for seed in self.seeds]
