"""Baselines that train for the processor seconds of `KFAC()`.

Batches, weight decays and first rates are those of docs/trainings.json. The
epochs of a baseline are multiplied by the ratio of the processor seconds at
equal epochs, of trainings there by one command: they have the same load. Then
its rate is searched again on held-out training data.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from targets.methods import KFAC, is_baseline
from targets.plan import SEARCH_SEED, losses_of
from targets.results import of_one_command, seconds_of, settings_of
from targets.run import FINAL, SEARCH, Run
from targets.study import TRAININGS, Record, Records


def final_trainings() -> list[Record]:
    """Return the final trainings at full size of docs/trainings.json."""
    return [
        record
        for record in Records(TRAININGS).runs
        if record["run"]["phase"] == FINAL and record["run"]["size"] == "full"
    ]


def known_settings(
    data: Mapping[str, str], methods: Sequence[str]
) -> Iterator[Run]:
    """Yield the settings of these trainings, on other data."""
    for run in settings_of(final_trainings()):
        if run.problem in data and run.method in methods:
            yield dataclasses.replace(run, data=data[run.problem])


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
        for kfac in self.settings:
            for run in self.settings:
                pair = kfac.method, kfac.problem
                if is_baseline(run.method) and pair == (KFAC, run.problem):
                    yield from self._longer(run, kfac, records)

    def _longer(
        self, run: Run, kfac: Run, records: Sequence[Record]
    ) -> Iterator[list[Run]]:
        """Yield the search of a rate, and the trainings with the best rate."""
        known = [
            record
            for record in final_trainings()
            if record["run"]["problem"] == run.problem
        ]
        known = of_one_command(known, (kfac.method, run.method))
        seconds = [
            seconds_of([r for r in known if r["run"]["method"] == method])
            for method in (kfac.method, run.method)
        ]
        share = float(f"{seconds[0] / seconds[1]:.3g}")
        if share <= 1:
            return  # equal epochs take these seconds
        best = dataclasses.replace(
            run, phase=SEARCH, share=share, seed=SEARCH_SEED
        )
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
