"""Which tests pytest-xdist runs in one process."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.jobs import SHAPES


class FilesAndClusters(LoadScopeScheduling):
    """Those of a file, or those of a cluster.

    Clusters of two workers have so many jobs that each file starts its own.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        # They come in a better order: see `conftest.py`.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        where = test.partition("[")[2].partition(":")[0]
        if where == "two":
            return f"{file}, two"
        return where if where in SHAPES else file
