"""Clusters of local processes, and their ports."""

import json
import os
import signal
import time
from typing import Any

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, ClusterError, Pool, Shape, run


# -------------------------------------------------------------- on a worker
def index() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def describe(*args: Any) -> Any:
    return index(), os.getpid(), args


def fail(worker: int) -> None:
    if worker in (-1, index()):
        raise RuntimeError(f"expected failure, worker {index()}")


def fail_and_hang(worker: int) -> None:
    fail(worker)
    hang()


def hang() -> None:
    time.sleep(60)


# --------------------------------------------------------------------- tests
def test_calls_share_processes() -> None:
    """Until the shape changes, a call fails or a worker dies."""

    def processes(pool: Pool, workers: int) -> list[int]:
        result = pool.run(Shape(workers), describe, 1, "a")
        assert [w[0] for w in result] == list(range(workers))
        assert [w[2] for w in result] == [(1, "a")] * workers
        return [w[1] for w in result]

    with Pool() as pool:
        first = processes(pool, 2)
        assert processes(pool, 2) == first
        other = processes(pool, 3)
        for process in first:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)
        with pytest.raises(ClusterError):
            pool.run(Shape(3), fail, -1)
        last = processes(pool, 3)
        assert last[0] != other[0]
        os.kill(last[0], signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(ClusterError, match="worker 0 exited with -9"):
            pool.run(Shape(3), describe)
        processes(pool, 3)


def test_ends_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the log of the last call only, and the stack of a hanging worker."""
    monkeypatch.setattr(cluster, "GRACE_S", 0.5)
    with Cluster(Shape()) as workers:
        for worker in (-1, 1):
            with pytest.raises(ClusterError) as error:
                workers.run(fail, worker)
        message = str(error.value)
        assert message.startswith(f"{__name__}:fail(1,): a worker raised")
        assert message.count("expected failure, worker 1") == 1
        assert "expected failure, worker 0" not in message
        with pytest.raises(ClusterError, match=r"(?s)1 failed.*in hang"):
            workers.run(fail_and_hang, 1)
    monkeypatch.setattr(cluster, "TIME_LIMIT_S", 2.5)
    with pytest.raises(ClusterError, match=r"not finished after 2.5 s"):
        run(hang)
