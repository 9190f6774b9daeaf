"""The settings of a training."""

import dataclasses

from targets.problems import HELD_OUT, Problem, problems_of

SEARCH, FINAL = "search", "final"


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings of a training.

    Attributes:
        phase: `SEARCH` measures with held-out training examples; `FINAL`
            trains on all of them and measures with the test set.
        size: One of `SIZES`.
        method: The optimizer, see `methods.parse`.
        rate: Initial learning rate; None is the optimizer's default.
        rest: Initial learning rate of K-FAC's rest optimizer, an Adam; None is
            the default.
        decay: Part of the weights that weight decay removes over the training.
        share: Length of the schedule over the problem's epochs.
    """

    phase: str
    problem: str
    size: str
    data: str
    method: str
    rate: float | None
    rest: float | None
    decay: float
    batch: int
    share: float
    seed: int

    @property
    def row(self) -> Problem:
        """The `Problem` of this run."""
        return problems_of(self.size)[self.problem]

    @property
    def setting(self) -> "Run":
        """The run without its seed."""
        return dataclasses.replace(self, seed=-1)

    def count_steps(self) -> int:
        """Return the number of steps, all with full batches."""
        examples = self.row.count_examples(self.size)
        if self.phase == SEARCH:
            examples = round(examples * (1 - HELD_OUT))
        return round(self.row.epochs * self.share * examples / self.batch)

    def __str__(self) -> str:
        text = f"{self.problem} ({self.size}, {self.data}), {self.method}"
        for name in ("rate", "rest", "decay"):
            if (value := getattr(self, name)) is not None:
                text += f", {name} {value:g}"
        return f"{text}, batch {self.batch}, seed {self.seed}"
