"""What an experiment is."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.running import Training

# What is different from one training of an experiment to another.
Case = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
        source: The paper, and its table or figure.
        question: What it answers.
        cases: What varies; the argument is whether it must be quick.
        task: What is trained for a case; the second argument is the same.
        measures: Columns of the table, by their headings.
        x: The heading on the plot's horizontal axis.
        y: Those on the vertical axes.
        elsewhere: What the paper had, and needs other machines.
    """

    source: str
    question: str
    cases: Callable[[bool], Sequence[Case]]
    task: Callable[[Case, bool], Training]
    measures: Mapping[str, Callable[[Any], float | None]]
    x: str
    y: Sequence[str]
    elsewhere: str


def grid(**values: Sequence[Any]) -> list[Case]:
    """All combinations."""
    return [
        dict(zip(values, some, strict=True))
        for some in itertools.product(*values.values())
    ]


def optimizer(name: str, **settings: Any) -> str:
    """An optimizer as the command line of the examples takes it."""
    pairs = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    )
    return ":".join([name, *pairs])
