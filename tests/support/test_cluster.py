"""The clusters that jobs of several workers run in."""

import os
import time
from typing import Any

import pytest

from tests.support import cluster
from tests.support.cluster import Case, Cluster, ClusterError, Pool, Shape, run

WORKERS = "tests.support.workers_cluster"


def target(name: str) -> str:
    return f"{WORKERS}:{name}"


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_cases_share_processes() -> None:
    """Until the shape changes, or a case fails."""
    with Pool() as pool:

        def describe(shape: Shape, *args: Any) -> list[Any]:
            return pool.run("", Case(target("describe"), args), shape).get()

        first, second = describe(Shape(), 1, "a"), describe(Shape())
        assert [w[0] for w in first] == [0, 1]
        assert [w[2] for w in first] == [(1, "a")] * 2
        processes = [w[1] for w in first]
        assert [w[1] for w in second] == processes
        other = describe(Shape(3))
        assert [w[0] for w in other] == [0, 1, 2]
        assert not any(is_running(process) for process in processes)
        assert pool.run("", Case(target("fail")), Shape(3)).complaint
        assert describe(Shape(3))[0][1] != other[0][1]


def test_failure_names_case_and_shows_its_log() -> None:
    with Cluster(Shape()) as cluster:
        good, bad, half, last = (
            cluster.run(name, Case(target(function), args))
            for name, function, args in (
                ("good", "describe", ()),
                ("bad", "fail", ()),
                ("half", "fail", (1,)),
                ("last", "describe", ()),
            )
        )
    good.get()
    last.get()
    assert all("told to fail" in str(e) for e in bad.errors)
    assert half.values == ["fine", None]
    with pytest.raises(ClusterError) as error:
        half.get()
    message = str(error.value)
    assert message.startswith("case 'half': a worker raised")
    assert message.count("told to fail, worker 1") == 1
    assert "told to fail, worker 0" not in message


def test_peers_of_a_failed_worker_do_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(ClusterError) as error:
        run(target("fail_and_hang"), 1)
    assert time.monotonic() - start < 10
    assert "worker 1 failed and the others did not" in str(error.value)
    # The stack of the one that was waiting.
    assert "in wait_for_a_peer_that_is_gone" in str(error.value)


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        ("die", (0,), "worker 0 exited with -9"),
        ("wait_for_a_peer_that_is_gone", (), "not finished after 2.5 s"),
        ("leave", (), "a worker raised"),
        ("not_picklable", (), "a worker raised"),
        ("missing", (), "a worker raised"),
    ],
)
def test_ends_are_noticed(function: str, args: Any, words: str) -> None:
    limit = 2.5 if words.startswith("not") else 60.0
    with pytest.raises(ClusterError, match=words):
        run(target(function), *args, time_limit=limit)


def test_devices_and_environment() -> None:
    assert run(target("count_devices"), workers=1, devices=3) == [3]
    values = run("os:getenv", "TFKFAC_TEST", environment={"TFKFAC_TEST": "yes"})
    assert values == ["yes", "yes"]
