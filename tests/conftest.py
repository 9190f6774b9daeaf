import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.cluster import SHAPES, Pool, cluster_of
from tests.support.garbage import tune_garbage_collection

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Start clusters; calls of one shape share their processes."""
    from tests.support.strategies import create_strategy

    # TensorFlow refuses a strategy after the first operation, which the import
    # of a test file may run.
    with Pool(create_strategy) as pool:
        yield pool


@pytest.fixture
def on_workers(pool: Pool) -> Run:
    """Call a function on every worker of a cluster of `SHAPES`.

    For example `first, second = on_workers("two", function, argument)`.
    """

    def run(where: str, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return pool.run(SHAPES[where], function, *args, **kwargs)

    return run


@pytest.fixture
def run_eagerly() -> Iterator[Callable[[bool], None]]:
    """Set whether functions run eagerly, where a trace takes more time."""
    import tensorflow as tf

    yield tf.config.run_functions_eagerly
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def double() -> Iterator[None]:
    """Set float64, where results differ by rounding only."""
    from tests.support.dtypes import floats

    with floats("float64"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of clusters first, by cluster; then the longest files."""
    counts = collections.Counter(item.path for item in items)
    clusters = list(SHAPES)

    def key(item: pytest.Item) -> tuple[int, int]:
        if "pool" not in getattr(item, "fixturenames", ()):
            return len(clusters), -counts[item.path]
        return clusters.index(cluster_of(item.name) or clusters[0]), 0

    items.sort(key=key)


def pytest_collection_finish() -> None:
    tune_garbage_collection()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests that share models or clusters in one process."""
    from tests.support.scheduling import FilesAndClusters

    return FilesAndClusters(config, log)
