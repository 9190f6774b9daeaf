import collections
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Runs jobs of several workers; it starts with the first of them."""
    with Pool() as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins: jobs, then files with many tests."""
    counts = collections.Counter(item.path for item in items)

    def key(item: pytest.Item) -> tuple[bool, int]:
        fixtures = getattr(item, "fixturenames", ())
        return "pool" not in fixtures, -counts[item.path]

    items.sort(key=key)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share models or jobs run in one process."""
    from tests.support.scheduling import FilesAndClusters

    return FilesAndClusters(config, log)
