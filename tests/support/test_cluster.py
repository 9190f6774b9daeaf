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


def die(worker: int) -> None:
    if worker == index():
        os.kill(os.getpid(), signal.SIGKILL)
    hang()


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


def test_an_error_shows_the_log_of_its_call() -> None:
    with Cluster(Shape()) as cluster:
        for worker in (-1, 1):
            with pytest.raises(ClusterError) as error:
                cluster.run(fail, worker)
    message = str(error.value)
    assert message.startswith(f"{__name__}:fail(1,): a worker raised")
    assert message.count("expected failure, worker 1") == 1
    assert "expected failure, worker 0" not in message


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (die, (0,), "worker 0 exited with -9"),
        (hang, (), "not finished after 2.5 s"),
        # The stack of the other worker is shown.
        (fail_and_hang, (1,), r"(?s)1 failed and the others did not.*in hang"),
        (f"{__name__}:missing", (), "a worker raised"),
    ],
)
def test_ends_are_reported(
    function: Any, args: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "GRACE_S", 0.5)
    if function is hang:
        monkeypatch.setattr(cluster, "TIME_LIMIT_S", 2.5)
    with pytest.raises(ClusterError, match=words):
        run(function, *args)
