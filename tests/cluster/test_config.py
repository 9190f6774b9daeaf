"""What `TF_CONFIG` and resolvers say of the workers."""

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

TWO = ["host0:2222", "host1:2223"]


def config(cluster: Any, kind: Any = "worker", index: Any = 0) -> str:
    return json.dumps(
        {"cluster": cluster, "task": {"type": kind, "index": index}}
    )


CHIEF = {"worker": TWO, "chief": ["host2:1"]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("{}", None),
        ('{"cluster": {}}', None),
        (config({"worker": TWO}, index=1), Cluster(tuple(TWO), 1)),
        (config(CHIEF, index=1), Cluster(("host2:1", *TWO), 2)),
        (config(CHIEF, "chief"), Cluster(("host2:1", *TWO), 0)),
        (config({"worker": TWO}, "evaluator"), None),
    ],
)
def test_what_is_found(text: str, found: Cluster | None) -> None:
    """The chief comes first; an evaluator trains with nobody."""
    assert read_tf_config(text) == found


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("[fe80::1%eth0]:80") == ("fe80::1%eth0", 80)
    assert split_address("a_b-c.d:65535") == ("a_b-c.d", 65535)
    found = Cluster(tuple(TWO), 0)
    assert found.name(1) == "worker 1 at host1:2223"


@pytest.mark.parametrize(
    "text",
    ["", ":1", "a", "a:", "a:0", "a:65536", "a:-1", "a:1.0", "a:x", "a: 1",
     "::1:80", "fe80::1:80", "[::1]", "[::1:80", "::1]:80", "[x]:80", "[]:80",
     "http://a:1", "http://a", "a:1/x", "a b:1", "a\n:1", "a:1\n", "u@a:1",
     "a,b:1", "a:1:2", "a:" + "1" * 5000, "a" * 300 + ":1", "a:\u0661",
     "[::1%\x1b]:80"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="address must be 'host:port'"):
        split_address(text)


def test_the_identity_of_a_job() -> None:
    """Equal on all workers; different for other addresses or Ray jobs."""
    jobs = []
    for cluster, ray in [(TWO, ""), (TWO[::-1], ""), (TWO, "1"), (TWO, "2")]:
        texts = [config({"worker": cluster}, index=i) for i in (0, 1)]
        clusters = [read_tf_config(text, ray) for text in texts]
        (job,) = {one.job for one in clusters if one is not None}
        jobs.append(job)
    assert len(set(jobs)) == 4 and all(jobs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ('{"cluster": ' * 100_000, "must be JSON"),
        (config({"worker": None}), "list the addresses"),
        (config({"worker": TWO, "evaluator": None}), "list the addresses"),
        ('{"task": null}', 'a "task" that is an object'),
        ('{"cluster": {}, "task": 5}', 'a "task" that is an object'),
        (config({"chief": None, "worker": TWO}), "list the addresses"),
        (config({"worker": ["::1:80", "a:1"]}), "'[IPv6 address]:port'"),
        (config({"worker": ["http://a:1"]}), "name workers as 'host:port'"),
        (config({"worker": [TWO[0], None]}), "list the addresses"),
        (config({"worker": 5}), "list the addresses"),
        (config({"worker": [f"a{i}:1" for i in range(9999)]}), "at most 4096"),
        ("[1]", "must be an object of JSON"),
        (json.dumps({"cluster": {"worker": TWO}}), 'have a "task"'),
        (config([1]), 'a "cluster" that is an object'),
        (config({"worker": "host0:1"}), "list the addresses"),
        (config({"worker": [1, 2]}), "list the addresses"),
        (config({"worker": ["host0"]}), "name workers as 'host:port'"),
        (config({"worker": ["host0:99999"]}), "name workers as 'host:port'"),
        (config({"worker": [TWO[0], TWO[0]]}), "name no address twice"),
        (config({"worker": TWO}, index=2), '"index" from 0 to 1'),
        (config({"worker": TWO}, index="0"), '"index" from 0 to 1'),
        (config({"worker": TWO}, index=True), '"index" from 0 to 1'),
        (config({"worker": TWO}, "node"), '"type" of chief, worker or'),
        (config({"worker": TWO}, []), '"type" of chief, worker or'),
    ],
)
def test_malformed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="`TF_CONFIG` must") as caught:
        read_tf_config(text)
    assert message in str(caught.value)


def test_a_resolver_says_the_same() -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": TWO}), task_type="worker", task_id=1
    )
    assert from_resolver(resolver) == Cluster(tuple(TWO), 1)
    anonymous = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": TWO})
    )
    assert from_resolver(anonymous) is None


def strategy_of(
    jobs: Any, kind: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> tfkfac.MultiWorkerMirroredStrategy:
    """The strategy of a resolver that is given, or of `TF_CONFIG`."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=kind, task_id=0
    )
    monkeypatch.setenv("TF_CONFIG", "" if given else config(jobs, kind))
    strategy = tfkfac.MultiWorkerMirroredStrategy(resolver if given else None)
    assert resolver.cluster_spec().as_dict() == jobs, "the user's own"
    return strategy


@pytest.mark.parametrize(
    ("kind", "given"), [("ps", False), ("worker", False), ("evaluator", True)]
)
def test_parameter_servers_are_refused(
    kind: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, by every task: with one worker, too, TensorFlow would wait."""
    jobs = {"worker": TWO[:1], "chief": ["host2:1"], "ps": ["host3:1"]}
    name = "Argument `cluster_resolver`" if given else "variable `TF_CONFIG`"
    with pytest.raises(
        ValueError, match=f'{name} must have no task "ps".*Remove them'
    ):
        strategy_of(jobs, kind, given, monkeypatch)


# --------------------------------------------------------------- evaluator
@pytest.mark.parametrize("given", [False, True], ids=["TF_CONFIG", "resolver"])
@pytest.mark.parametrize("own", [{}, {"evaluator": ["host2:1"]}])
def test_an_evaluator_is_alone_and_says_so(
    given: bool, own: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Whether its own address is in the cluster or not."""
    jobs = {"worker": TWO, **own}
    strategy = strategy_of(jobs, "evaluator", given, monkeypatch)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == "evaluator"
    # In which TensorFlow would look for workers, and end its collectives.
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}
    (said,) = capsys.readouterr().err.splitlines()
    assert "evaluator: it takes no part" in said
    assert "trains alone" in said
