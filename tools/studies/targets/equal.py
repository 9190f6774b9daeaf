"""Baselines that train for the processor seconds of `KFAC()`.

Batches, weight decays and first rates are those of docs/trainings.json. The
epochs of a baseline are multiplied by the ratio of the processor seconds at
equal epochs. These are seconds of trainings there by one command, on one
machine. Then the rate is searched again on held-out training data.
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
    """Yield the settings of the final trainings, on other data."""
    for run in settings_of(final_trainings()):
        if run.problem in data and run.method in methods:
            yield dataclasses.replace(run, data=data[run.problem])


def share_of_epochs(baseline: Run) -> float:
    """Return the epochs that take the seconds of `KFAC()`, over the baseline's.

    Raises:
        ValueError: If no command of docs/trainings.json trained both.
    """
    known = [
        record
        for record in final_trainings()
        if record["run"]["problem"] == baseline.problem
    ]
    pair = KFAC, baseline.method
    known = of_one_command(known, pair)
    groups = [[r for r in known if r["run"]["method"] == m] for m in pair]
    if not all(groups):
        raise ValueError(
            f"{baseline.problem}: no command of docs/trainings.json trained "
            f"both {KFAC} and {baseline.method}: seconds are not comparable"
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
        shares = {
            run: share_of_epochs(run)
            for run in self.settings
            if is_baseline(run.method)
        }
        for run in self.settings:
            yield self._with_seeds(run)
        for run, share in shares.items():
            if share > 1:  # else equal epochs take the seconds of `KFAC()`
                yield from self._longer(run, share, records)

    def _longer(
        self, run: Run, share: float, records: Sequence[Record]
    ) -> Iterator[list[Run]]:
        """Yield the search of a rate, and the trainings with the best rate."""
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
