"""Clusters of local processes, and their ports."""

import json
import os
import signal
import socket
import time
from typing import Any

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, ClusterError, Pool, Shape, run
from tests.support.ports import address, claim_ports


# -------------------------------------------------------------- on a worker
def index() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def describe(*args: Any) -> Any:
    return index(), os.getpid(), args


def fail(worker: int) -> str:
    if worker in (-1, index()):
        raise RuntimeError(f"expected failure, worker {index()}")
    return "no failure"


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
def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_calls_share_processes() -> None:
    """Until the shape changes, or a call fails."""
    with Pool() as pool:
        first = pool.run(Shape(), describe, 1, "a")
        assert [w[0] for w in first] == [0, 1]
        assert [w[2] for w in first] == [(1, "a")] * 2
        processes = [w[1] for w in first]
        assert [w[1] for w in pool.run(Shape(), describe)] == processes
        other = pool.run(Shape(3), describe)
        assert [w[0] for w in other] == [0, 1, 2]
        assert not any(is_running(process) for process in processes)
        with pytest.raises(ClusterError):
            pool.run(Shape(3), fail, -1)
        assert pool.run(Shape(3), describe)[0][1] != other[0][1]


def test_a_worker_that_died_between_calls_is_replaced() -> None:
    with Pool() as pool:
        (_, process, _), _ = pool.run(Shape(), describe)
        os.kill(process, signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(ClusterError, match="worker 0 exited with -9"):
            pool.run(Shape(), describe)
        assert pool.run(Shape(), describe)[0][0] == 0


def test_an_error_shows_the_log_of_its_call() -> None:
    with Cluster(Shape()) as cluster:
        cluster.run(describe)
        for worker in (-1, 1):
            with pytest.raises(ClusterError) as error:
                cluster.run(fail, worker)
        cluster.run(describe)
    message = str(error.value)
    assert message.startswith(f"{__name__}:fail(1,): a worker raised")
    assert message.count("expected failure, worker 1") == 1
    assert "expected failure, worker 0" not in message


def test_workers_do_not_hang_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "GRACE_S", 0.5)
    start = time.monotonic()
    with pytest.raises(ClusterError) as error:
        run(fail_and_hang, 1)
    assert time.monotonic() - start < 10
    assert "worker 1 failed and the others did not" in str(error.value)
    assert "in hang" in str(error.value)  # the stack of the other worker


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (die, (0,), "worker 0 exited with -9"),
        (hang, (), "not finished after 2.5 s"),
        ("sys:exit", ("leaving",), "a worker raised"),
        (f"{__name__}:missing", (), "a worker raised"),
    ],
)
def test_ends_are_reported(function: Any, args: Any, words: str) -> None:
    limit = 2.5 if words.startswith("not") else 60.0
    with pytest.raises(ClusterError, match=words):
        run(function, *args, time_limit=limit)


def test_claimed_ports_are_free_and_unique() -> None:
    claims = claim_ports(5) + claim_ports(5)
    assert len({address(claim) for claim in claims}) == 10
    for claim in claims:
        with socket.create_server(claim.getsockname()):
            pass
        claim.close()
