"""Which trainings there are."""

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.variants import Variant, check_family, parse_any
from targets.problems import KFACS, METHODS, PROBLEMS


@dataclasses.dataclass(frozen=True)
class Run:
    """A training, told from all others.

    Attributes:
        problem: One of `PROBLEMS`.
        size: One of `SIZES`.
        data: What it is trained on.
        method: NAME[@FOLDER][:KEY=VALUE...], see `parse_method`.
        rate: First learning rate; None is K-FAC's default.
        length: One of `LENGTHS`.
        seed: That of weights and batches.
        threads: Threads of the process.
    """

    problem: str
    size: str
    data: str
    method: str
    rate: float | None
    length: str
    seed: int
    threads: int

    @property
    def variant(self) -> Variant:
        """The method, parsed."""
        return parse_method(self.method)

    @property
    def is_kfac(self) -> bool:
        """Whether K-FAC's batches and epochs are meant."""
        return self.variant.name in KFACS

    @property
    def batch(self) -> int:
        """Examples of a batch."""
        return PROBLEMS[self.problem].batch_of(self.is_kfac)

    def count_steps(self) -> int:
        """Steps of the whole training."""
        problem = PROBLEMS[self.problem]
        return problem.count_steps(self.size, self.length, self.is_kfac)

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" at {self.rate:g}"
        return (
            f"{self.problem} ({self.size}, {self.data}), {self.method}{rate}, "
            f"{self.length} length, seed {self.seed}"
        )


def parse_method(text: str) -> Variant:
    """Parses a method.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    variant = parse_any(text)
    check_family(variant.name, variant.name, METHODS)
    return variant


def rates_of(problem: str, method: str) -> Sequence[float | None]:
    """The learning rates that a method is tried with."""
    name = parse_method(method).name
    if name in KFACS:
        return (None,)
    return PROBLEMS[problem].rates[name.removeprefix("fosi-")]


def plan(
    problem: str,
    size: str,
    data: str,
    methods: Sequence[str],
    lengths: Sequence[str],
    seeds: Sequence[int],
    threads: int,
    rates: Sequence[float] | None = None,
    quick: bool = False,
) -> Iterator[Run]:
    """Yields all trainings of a problem, a whole seed after the other.

    Args:
        problem: One of `PROBLEMS`.
        size: One of `SIZES`.
        data: What it is trained on.
        methods: Methods.
        lengths: Some of `LENGTHS`.
        seeds: Seeds.
        threads: Threads of a process.
        rates: Learning rates of all methods but K-FAC; None are the problem's.
        quick: Whether two of these are enough.
    """
    for seed in seeds:
        for method in methods:
            tried = rates_of(problem, method)
            if tried != (None,):
                tried = rates or (tried[1:3] if quick else tried)
            for rate in tried:
                for length in lengths:
                    yield Run(
                        problem,
                        size,
                        data,
                        method,
                        rate,
                        length,
                        seed,
                        threads,
                    )
