"""What `TF_CONFIG` and resolvers say of the workers."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

import tfkfac
from tests.support.ports import address, claim_ports
from tfkfac.cluster.config import Cluster, from_resolver, read_tf_config

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


# ------------------------------------------------------- parameter servers
@pytest.mark.parametrize("kind", ["ps", "worker", "chief", "evaluator"])
@pytest.mark.parametrize("given", [False, True], ids=["TF_CONFIG", "resolver"])
def test_parameter_servers_are_refused(
    kind: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, by every task: with one worker, too, TensorFlow would wait."""
    jobs = {"worker": TWO[:1], "chief": ["host2:1"], "ps": ["host3:1"]}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=kind, task_id=0
    )
    monkeypatch.setenv("TF_CONFIG", "" if given else config(jobs, kind))
    name = "Argument `cluster_resolver`" if given else "variable `TF_CONFIG`"
    with pytest.raises(
        ValueError, match=f'{name} must have no task "ps".*Remove them'
    ):
        tfkfac.MultiWorkerMirroredStrategy(resolver if given else None)


# --------------------------------------------------------------- evaluator
@pytest.mark.parametrize("given", [False, True], ids=["TF_CONFIG", "resolver"])
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_an_evaluator_is_alone_and_says_so(
    given: bool, named: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Whether its own address is in the cluster or not."""
    jobs = {"worker": TWO} | ({"evaluator": ["host2:1"]} if named else {})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type="evaluator", task_id=0
    )
    text = "" if given else config(jobs, "evaluator")
    monkeypatch.setenv("TF_CONFIG", text)
    strategy = tfkfac.MultiWorkerMirroredStrategy(resolver if given else None)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == "evaluator"
    assert resolver.cluster_spec().as_dict() == jobs, "the user's own"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "evaluator: it takes no part" in said
    assert "trains alone" in said


TRAINS = """
import time
import keras, numpy as np, tfkfac
strategy = tfkfac.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfkfac.KFAC(), "mse")
time.sleep(1.5)
model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
"""


def test_an_evaluator_does_not_look_for_workers() -> None:
    """TensorFlow would, and end its collectives after a second."""
    claims = claim_ports(2)
    jobs = {"worker": [address(claims[0])], "evaluator": [address(claims[1])]}
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRAINS],
            env={**os.environ, "TF_CONFIG": config(jobs, "evaluator")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        for claim in claims:
            claim.close()
    assert done.returncode == 0, done.stderr
    assert "aborting collectives" not in done.stderr
