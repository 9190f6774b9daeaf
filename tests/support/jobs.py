"""Jobs of several workers, by name; each runs once, whoever asks first."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from tests.support.cluster import Case, Outcome, Pool, Shape

# The first word of a job's name.
SHAPES = {
    "two": Shape(workers=2),
    "four": Shape(workers=4),
    "mirrored": Shape(workers=1, devices=2),
}
TIME_LIMIT = 180.0  # seconds for a job; it takes a few when quiet


def cluster_of(name: str) -> str:
    return name.partition(":")[0]


def shape_of(name: str) -> Shape:
    return SHAPES[cluster_of(name)]


def replicas_of(name: str) -> int:
    shape = shape_of(name)
    return shape.workers * shape.devices


def kind_of(name: str) -> str:
    """Of `strategies.strategy`."""
    return "multi" if shape_of(name).workers > 1 else "mirrored"


class Jobs:
    """The jobs that the tests of a file have in common.

    Args:
        module: Where the functions are that they run.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module.__name__
        self._cases: dict[str, Case] = {}
        self._slow: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}

    def add(
        self,
        name: str,
        function: str,
        *args: Any,
        slow: bool = False,
        **kwargs: Any,
    ) -> None:
        """Adds a job; the function's first argument is the strategy's kind."""
        assert name not in self._cases
        target = f"{self._module}:{function}"
        self._cases[name] = Case(target, (kind_of(name), *args), kwargs)
        if slow:
            self._slow.add(name)

    def params(self, names: Iterable[str]) -> list[Any]:
        """Parameters of a test, by cluster; those of slow jobs are marked."""
        order = list(SHAPES)
        names = sorted(names, key=lambda name: order.index(cluster_of(name)))
        return [pytest.param(n, marks=self.marks(n), id=n) for n in names]

    def marks(self, name: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] if name in self._slow else []

    def results(self, pool: Pool, name: str) -> list[Any]:
        """What the processes returned."""
        if name not in self._outcomes:
            self._outcomes[name] = pool.run(
                name, self._cases[name], shape_of(name), TIME_LIMIT
            )
        return self._outcomes[name].get()
