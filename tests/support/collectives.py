"""Trainings of dense models, and the order of collectives in their graphs."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfkfac.training.job
from tests.support.graphs import bodies_of, functions_of
from tests.support.strategies import strategy
from tfkfac.distributed.topology import Topology, find_topology

FOSI = {"num_largest": 2, "warmup_steps": 1, "lanczos_steps": 3}
MODES = ("comm_opt", "mem_opt", "dp_kfac", "hybrid_opt")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    **{
        mode: lambda m=mode: tfkfac.KFAC(step="natural", distribution=m)
        for mode in MODES
    },
    "rows": lambda: tfkfac.FOSI(layout="rows", **FOSI),
    "columns": lambda: tfkfac.FOSI(layout="columns", **FOSI),
    "accelerator": lambda: tfkfac.FOSI(
        accelerator_fraction=0.5, update_interval=2, **FOSI
    ),
    "half": lambda: tfkfac.KFAC(
        step="natural",
        solver="eigen",
        distribution=tfkfac.Distribution(
            factor_dtype="bfloat16", inverse_dtype="bfloat16"
        ),
    ),
}


def build(of: Any, optimizer: str, hidden: Sequence[int]) -> Any:
    """Compile a dense model in the scope of a strategy."""
    keras.utils.set_random_seed(0)
    with of.scope():
        model = keras.Sequential([keras.Input((4,))])
        for units in hidden:
            model.add(keras.layers.Dense(units, activation="tanh"))
        model.add(keras.layers.Dense(3))
        model.compile(
            OPTIMIZERS[optimizer](),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def batches(count: int) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * count, 4)).astype("float32")
    y = rng.integers(0, 3, len(x))
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.batch(8, drop_remainder=True).with_options(options)


def graph_over_nccl(
    optimizer: str, hidden: Sequence[int]
) -> tuple[tf.Graph, Any]:
    """Trace a step over NCCL, never run; return its graph and the model."""

    def on_gpus(of: tf.distribute.Strategy) -> Topology:
        return dataclasses.replace(find_topology(of), hint="nccl")

    with mock.patch.object(tfkfac.training.job, "find_topology", on_gpus):
        model = build(strategy(), optimizer, hidden)
    distributed = strategy().experimental_distribute_dataset(batches(1))

    @tf.function(autograph=False)
    def step(batch: Any) -> Any:
        return strategy().run(model.train_step, args=(batch,))

    return step.get_concrete_function(next(iter(distributed))).graph, model


# ------------------------------------------------------------------ graphs
def audit(graph: tf.Graph) -> dict[str, Any]:
    """Return pairs of collectives of a replica, and those without an order."""
    pairs, unordered = 0, []
    bodies, functions = bodies_of(graph)
    for nodes in bodies:
        by_device = collections.defaultdict(list)
        for node in nodes:
            if contains(node, functions, is_collective):
                by_device[node.device].append(node)
        parents = parents_of(nodes)
        for local in by_device.values():
            for first, second in itertools.combinations(local, 2):
                pairs += 1
                if not (
                    second.name in ancestors(first.name, parents)
                    or first.name in ancestors(second.name, parents)
                ):
                    unordered.append((first.op, second.op))
    return {"pairs": pairs, "unordered": unordered}


def is_collective(node: Any) -> bool:
    return str(node.op).startswith("Collective") and "Group" not in node.op


def contains(
    node: Any, functions: Mapping[str, Any], wanted: Callable[[Any], bool]
) -> bool:
    """Return True if a node, or a node of a function it calls, is wanted."""
    return wanted(node) or any(
        contains(inner, functions, wanted)
        for name in functions.keys() & functions_of(node)
        for inner in functions[name].node_def
    )


def parents_of(nodes: Any) -> dict[str, list[str]]:
    """Return the inputs of each node."""
    return {
        node.name: [i.lstrip("^").partition(":")[0] for i in node.input]
        for node in nodes
    }


def ancestors(name: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the nodes that run before a node."""
    done: set[str] = set()
    remaining = [name]
    while remaining:
        for parent in parents.get(remaining.pop(), ()):
            if parent not in done:
                done.add(parent)
                remaining.append(parent)
    return done
