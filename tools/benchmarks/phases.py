"""From the times of steps to the cost of an interval.

A K-FAC step's time depends on where it stands in the interval of the
decompositions. So the steps are sorted by phase, the step's number modulo the
interval; the median of each phase over the intervals that were run drops what
the machine did besides, and the mean over the phases is the time of a step as
training has it. Nothing is assumed about when in the interval the work is done.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Mix:
    """Steps between updates of the factors, and of the decompositions."""

    factor: int
    inverse: int

    @property
    def period(self) -> int:
        """After how many steps everything comes again."""
        return math.lcm(self.factor, self.inverse)

    def __str__(self) -> str:
        return f"({self.factor},{self.inverse})"


def parse_mix(text: str) -> Mix:
    """Parses FACTOR,INVERSE.

    Raises:
        argparse.ArgumentTypeError: If it is not of that form.
    """
    parts = text.split(",")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not FACTOR,INVERSE, two numbers of steps"
        )
    return Mix(*map(int, parts))


@dataclasses.dataclass(frozen=True)
class Phases:
    """The typical time of each phase of an interval.

    Attributes:
        mix: The intervals that were run.
        times: By phase, the median over the intervals.
    """

    mix: Mix
    times: tuple[float, ...]

    @classmethod
    def of(cls, mix: Mix, first: int, times: Sequence[float]) -> "Phases":
        """Sorts the times of consecutive steps.

        Args:
            mix: The intervals.
            first: The number of the first step, counted from 0.
            times: Those of whole intervals.
        """
        period = mix.period
        starts = [(phase - first) % period for phase in range(period)]
        return cls(
            mix, tuple(statistics.median(times[s::period]) for s in starts)
        )

    @property
    def mean(self) -> float:
        """Time of a step, over the whole interval."""
        return statistics.fmean(self.times)

    @property
    def median(self) -> float:
        """Time of the step in the middle."""
        return statistics.median(self.times)

    @property
    def longest(self) -> float:
        """Time of the dearest step of the interval."""
        return max(self.times)

    def kinds(self) -> dict[str, float]:
        """Medians of the steps by what the intervals alone say is due.

        "inverse" at a multiple of that interval, else "factor" at a multiple
        of that one, else "plain". An optimizer that spreads its decompositions
        over the interval does them in "factor" and "plain" steps too.
        """
        kinds: dict[str, list[float]] = {}
        for phase, time in enumerate(self.times):
            if phase % self.mix.inverse == 0:
                kind = "inverse"
            else:
                kind = "plain" if phase % self.mix.factor else "factor"
            kinds.setdefault(kind, []).append(time)
        return {kind: statistics.median(ts) for kind, ts in kinds.items()}
