"""A training, told from all others."""

import dataclasses

from targets.problems import HELD_OUT, Problem, problem_of

SEARCH, FINAL = "search", "final"


@dataclasses.dataclass(frozen=True)
class Run:
    """A training, told from all others.

    Attributes:
        phase: `SEARCH` measures with a part of the training examples, which is
            not trained on; `FINAL` trains on all of them and measures with the
            test set.
        problem: Name of the problem.
        size: One of `SIZES`.
        data: What it is trained on.
        method: The optimizer, see `methods.parse`.
        rate: First learning rate; None is the optimizer's own.
        rest: First learning rate of K-FAC's rest optimizer, an Adam; None is
            the optimizer's own choice.
        decay: Part of the weights that weight decay takes away over the whole
            training.
        batch: Examples of a batch.
        share: Length of the schedule over the problem's epochs.
        seed: That of weights and batches.
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
        """The problem."""
        return problem_of(self.problem, self.size)

    @property
    def setting(self) -> "Run":
        """The run without its seed."""
        return dataclasses.replace(self, seed=-1)

    def count_steps(self) -> int:
        """Steps of the whole training; its batches are full ones."""
        examples = self.row.count_examples(self.size)
        if self.phase == SEARCH:
            examples = round(examples * (1 - HELD_OUT))
        return round(self.row.epochs * self.share * examples / self.batch)

    def __str__(self) -> str:
        parts = [f"{self.problem} ({self.size}, {self.data}), {self.method}"]
        parts += [f"rate {self.rate:g}"] if self.rate is not None else []
        parts += [f"rest {self.rest:g}"] if self.rest is not None else []
        parts += [f"decay {self.decay:g}"] if self.decay else []
        return ", ".join([*parts, f"batch {self.batch}", f"seed {self.seed}"])
