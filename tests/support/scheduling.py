"""Which tests pytest-xdist runs in one process."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.cluster import cluster_of


class FilesAndClusters(LoadScopeScheduling):
    """Run the tests of a file, or of a cluster, in one process.

    Clusters of two workers have so many jobs that each file starts its own.
    Programs that take minutes share nothing: each may have its own process.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        # They come in a better order: see `conftest.py`.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.endswith("test_real_examples.py"):
            return nodeid
        where = cluster_of(test)
        return where if where in ("four", "mirrored") else f"{file}, {where}"
