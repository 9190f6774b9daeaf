"""What `TF_CONFIG` and resolvers say of the workers."""

import json
from typing import Any

import pytest
import tensorflow as tf

from tfkfac.distributed.cluster import Cluster, from_resolver, read_tf_config

TWO = ["host0:2222", "host1:2223"]


def config(cluster: Any, kind: Any = "worker", index: Any = 0) -> str:
    return json.dumps(
        {"cluster": cluster, "task": {"type": kind, "index": index}}
    )


@pytest.mark.parametrize("text", ["", "{}", '{"cluster": {}}'])
def test_without_a_cluster_there_is_none(text: str) -> None:
    assert read_tf_config(text) is None


def test_workers_in_order() -> None:
    found = read_tf_config(config({"worker": TWO}, index=1))
    assert found == Cluster(("host0:2222", "host1:2223"), 1)
    assert found.own_port == 2223
    assert found.name(0) == "worker 0 at host0:2222"


def test_the_chief_comes_first() -> None:
    jobs = {"worker": TWO, "chief": ["host2:1"]}
    found = read_tf_config(config(jobs, index=1))
    assert found == Cluster(("host2:1", *TWO), 2)
    chief = read_tf_config(config(jobs, "chief"))
    assert chief == Cluster(("host2:1", *TWO), 0)


def test_an_evaluator_trains_with_nobody() -> None:
    assert read_tf_config(config({"worker": TWO}, "evaluator")) is None


def test_ports_of_ipv6_addresses() -> None:
    found = read_tf_config(config({"worker": ["[::1]:80", "[::2]:81"]}))
    assert found is not None
    assert found.own_port == 80


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
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
