"""Read the workers of a job from `TF_CONFIG` and resolvers."""

import json
from typing import Any

import pytest
import tensorflow as tf

import tfkfac
from tfkfac.cluster.config import (
    Cluster,
    from_resolver,
    read_tf_config,
    split_address,
)

WORKERS = ["host0:2222", "host1:2223"]


def config(cluster: Any, task_type: Any = "worker", index: Any = 0) -> str:
    return json.dumps(
        {"cluster": cluster, "task": {"type": task_type, "index": index}}
    )


CHIEF = {"worker": WORKERS, "chief": ["host2:1"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("{}", None),
        ('{"cluster": {}}', None),
        (config({"worker": WORKERS}, index=1), Cluster(tuple(WORKERS), 1)),
        (config(CHIEF, index=1), Cluster(("host2:1", *WORKERS), 2)),
        (config(CHIEF, "chief"), Cluster(("host2:1", *WORKERS), 0)),
        (config({"worker": WORKERS}, "evaluator"), None),
    ],
)
def test_read_tf_config(text: str, expected: Cluster | None) -> None:
    """The chief is worker 0; an evaluator has no cluster."""
    assert read_tf_config(text) == expected


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("[fe80::1%eth0]:80") == ("fe80::1%eth0", 80)
    assert split_address("a_b-c.d:65535") == ("a_b-c.d", 65535)
    assert Cluster(tuple(WORKERS), 0).name(1) == "worker 1 at host1:2223"
    for text in (
        "", ":1", "a", "a:", "a:0", "a:65536", "a:-1", "a:1.0", "a:x", "a: 1",
        "::1:80", "[::1]", "[::1:80", "::1]:80", "[x]:80", "[]:80",
        "http://a:1", "http://a", "a:1/x", "a b:1", "a\n:1", "a:1\n", "u@a:1",
        "a,b:1", "a:1:2", "a:" + "1" * 5000, "a" * 300 + ":1", "a:\u0661",
        "[::1%\x1b]:80",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="address must be 'host:port'"):
            split_address(text)


def test_the_identity_of_a_job() -> None:
    """Equal on all workers; different for other addresses or Ray jobs."""
    jobs = []
    for cluster, ray in [
        (WORKERS, ""),
        (WORKERS[::-1], ""),
        (WORKERS, "1"),
        (WORKERS, "2"),
    ]:
        texts = [config({"worker": cluster}, index=i) for i in (0, 1)]
        clusters = [read_tf_config(text, ray) for text in texts]
        (job,) = {x.job for x in clusters if x is not None}
        jobs.append(job)
    assert len(set(jobs)) == 4 and all(jobs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[1]", "must be an object of JSON"),
        ('{"task": null}', 'a "task" that is an object'),
        (json.dumps({"cluster": {"worker": WORKERS}}), 'have a "task"'),
        (config([1]), 'a "cluster" that is an object'),
        (config({"worker": "host0:1"}), "list the addresses"),
        (config({"chief": None, "worker": WORKERS}), "list the addresses"),
        (config({"worker": WORKERS, "evaluator": None}), "list the addresses"),
        (config({"worker": [WORKERS[0], None]}), "list the addresses"),
        (config({"worker": [f"a{i}:1" for i in range(9999)]}), "at most 4096"),
        (config({"worker": ["::1:80", "a:1"]}), "name workers as 'host:port'"),
        (config({"worker": [WORKERS[0], WORKERS[0]]}), "name no address twice"),
        (config({"worker": WORKERS}, index=2), '"index" from 0 to 1'),
        (config({"worker": WORKERS}, index="0"), '"index" from 0 to 1'),
        (config({"worker": WORKERS}, index=True), '"index" from 0 to 1'),
        (config({"worker": WORKERS}, "node"), '"type" of chief, worker or'),
        (config({"worker": WORKERS}, []), '"type" of chief, worker or'),
    ],
)
def test_malformed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="`TF_CONFIG` must") as caught:
        read_tf_config(text)
    assert message in str(caught.value)


def resolver_of(jobs: Any, *task: Any) -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), "", *task
    )


def test_from_resolver() -> None:
    resolver = resolver_of({"worker": WORKERS}, "worker", 1)
    assert from_resolver(resolver) == Cluster(tuple(WORKERS), 1)
    assert from_resolver(resolver_of({"worker": WORKERS})) is None


def strategy_of(
    jobs: Any, task_type: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> tfkfac.MultiWorkerMirroredStrategy:
    """Create a strategy from a resolver if `given`, else from `TF_CONFIG`."""
    resolver = resolver_of(jobs, task_type, 0)
    monkeypatch.setenv("TF_CONFIG", "" if given else config(jobs, task_type))
    strategy = tfkfac.MultiWorkerMirroredStrategy(resolver if given else None)
    assert resolver.cluster_spec().as_dict() == jobs, (
        "the resolver of the user is unchanged"
    )
    return strategy


@pytest.mark.parametrize(
    ("task_type", "given"),
    [("ps", False), ("worker", False), ("evaluator", True)],
)
def test_parameter_servers_are_refused(
    task_type: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every task, before TensorFlow waits for the servers."""
    jobs = {"worker": WORKERS[:1], "chief": ["host2:1"], "ps": ["host3:1"]}
    name = "Argument `cluster_resolver`" if given else "variable `TF_CONFIG`"
    with pytest.raises(
        ValueError, match=f'{name} must have no task "ps".*Remove them'
    ):
        strategy_of(jobs, task_type, given, monkeypatch)


@pytest.mark.parametrize(
    ("given", "evaluators"), [(False, {}), (True, {"evaluator": ["host2:1"]})]
)
def test_an_evaluator_runs_alone(
    given: bool, evaluators: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With and without its address in the cluster."""
    jobs = {"worker": WORKERS, **evaluators}
    strategy = strategy_of(jobs, "evaluator", given, monkeypatch)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == "evaluator"
    # With workers in it, TensorFlow would abort the collectives.
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}
    assert "this process is an evaluator" in capsys.readouterr().err
