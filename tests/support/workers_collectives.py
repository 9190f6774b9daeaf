"""What the tests of collectives run: which of a step no path orders."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfkfac.training.job
from tests.support.gpu_kernels import nodes_of, without_gpu_kernel
from tests.support.graphs import functions_of
from tests.support.reference import Array
from tests.support.strategies import strategy
from tfkfac.distributed import collectives
from tfkfac.distributed.topology import Topology, find_topology

FOSI = {"num_largest": 2, "warmup_steps": 1, "lanczos_steps": 3}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "comm_opt": lambda: tfkfac.KFAC(distribution="comm_opt"),
    "mem_opt": lambda: tfkfac.KFAC(distribution="mem_opt"),
    "dp_kfac": lambda: tfkfac.KFAC(distribution="dp_kfac"),
    "hybrid_opt": lambda: tfkfac.KFAC(distribution="hybrid_opt"),
    "rows": lambda: tfkfac.FOSI(layout="rows", **FOSI),
    "columns": lambda: tfkfac.FOSI(layout="columns", **FOSI),
    "accelerator": lambda: tfkfac.FOSI(
        accelerator_fraction=0.5, update_interval=2, **FOSI
    ),
}

# Rounded too much to be compared with others.
HALF: dict[str, Callable[[], Any]] = {
    "half": lambda: tfkfac.KFAC(
        solver="eigen",
        distribution=tfkfac.Distribution(
            factor_dtype="bfloat16", inverse_dtype="bfloat16"
        ),
    ),
}


def compiled(kind: str, optimizer: str, hidden: Sequence[int]) -> Any:
    return build(strategy(kind), optimizer, hidden)


def build(of: Any, optimizer: str, hidden: Sequence[int]) -> Any:
    """Compiles a dense model in the scope of a strategy."""
    keras.utils.set_random_seed(0)
    with of.scope():
        model = keras.Sequential([keras.Input((4,))])
        for units in hidden:
            model.add(keras.layers.Dense(units, activation="tanh"))
        model.add(keras.layers.Dense(3))
        model.compile(
            (OPTIMIZERS | HALF)[optimizer](),
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


def one_layer(kind: str, optimizer: str) -> list[Array]:
    """Trains a model of which a replica owns all and the other nothing."""
    model = compiled(kind, optimizer, [])
    model.fit(batches(6), verbose=0)
    return [np.asarray(w) for w in model.get_weights()]


# -------------------------------------------------------------------- order
def step_over_nccl(kind: str, optimizer: str) -> dict[str, Any]:
    """Looks at a step over NCCL, which is traced and never run.

    Returns:
        Pairs of collectives of a replica, and those that no path orders; what
        a GPU could not do; and the bytes said to be received.
    """
    graph, model = graph_over_nccl(kind, optimizer, [5, 5])
    return audit(graph) | {
        "not on a GPU": without_gpu_kernel(graph),
        "added up": {
            tf.as_dtype(node.attr["T"].type).name
            for node in nodes_of(graph)
            if node.op == "CollectiveReduce"
        },
        "bytes": model.optimizer.communication_bytes(),
    }


def graph_over_nccl(
    kind: str, optimizer: str, hidden: Sequence[int]
) -> tuple[tf.Graph, Any]:
    """Traces a step over NCCL; returns its graph and the model."""
    with mock.patch.object(tfkfac.training.job, "find_topology", on_gpus):
        model = compiled(kind, optimizer, hidden)
    distributed = strategy(kind).experimental_distribute_dataset(batches(1))

    @tf.function(autograph=False)
    def step(batch: Any) -> Any:
        return strategy(kind).run(model.train_step, args=(batch,))

    return step.get_concrete_function(next(iter(distributed))).graph, model


def on_gpus(of: tf.distribute.Strategy) -> Topology:
    return dataclasses.replace(find_topology(of), hint="nccl")


def bodies_of(graph: tf.Graph) -> tuple[list[Any], Mapping[str, Any]]:
    """The nodes of a graph and of each of its functions, and these by name."""
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    nodes = [f.node_def for f in functions.values()]
    return [definition.node, *nodes], functions


def audit(graph: tf.Graph) -> dict[str, Any]:
    """How many collectives a graph has, and which of them no path orders."""
    collectives, pairs, unordered = 0, 0, []
    bodies, functions = bodies_of(graph)
    for nodes in bodies:
        by_device = collections.defaultdict(list)
        for node in nodes:
            if holds(node, functions, is_collective):
                by_device[node.device].append(node)
                collectives += is_collective(node)
        parents = parents_of(nodes)
        for ours in by_device.values():
            for first, second in itertools.combinations(ours, 2):
                pairs += 1
                if not (
                    second.name in ancestors(first.name, parents)
                    or first.name in ancestors(second.name, parents)
                ):
                    unordered.append((first.op, second.op))
    return {"collectives": collectives, "pairs": pairs, "unordered": unordered}


def is_collective(node: Any) -> bool:
    return str(node.op).startswith("Collective") and "Group" not in node.op


def holds(
    node: Any, functions: Mapping[str, Any], wanted: Callable[[Any], bool]
) -> bool:
    """Whether a node is of a kind or calls a function that has one."""
    return wanted(node) or any(
        holds(inner, functions, wanted)
        for name in functions.keys() & functions_of(node)
        for inner in functions[name].node_def
    )


def parents_of(nodes: Any) -> dict[str, list[str]]:
    """What has to be done right before each node of a graph."""
    return {
        node.name: [i.lstrip("^").partition(":")[0] for i in node.input]
        for node in nodes
    }


def ancestors(name: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """All that have to be done before a node."""
    done: set[str] = set()
    open_ = [name]
    while open_:
        for parent in parents.get(open_.pop(), ()):
            if parent not in done:
                done.add(parent)
                open_.append(parent)
    return done


# ----------------------------------------------------- what a message waits for
class Branch(NamedTuple):
    """A branch of a step with messages, on one replica.

    Attributes:
        work: The pieces of work in it.
        before: For each message, those that it waits for.
    """

    work: set[str]
    before: list[set[str]]


def waits(
    kind: str, optimizer: str, hidden: Sequence[int], kernel: str
) -> dict[str, Any]:
    """Traces a step in which each tensor has a message of its own.

    The order that NCCL needs is in it: all that may have to wait does. A piece
    of work is known by an operation.

    Returns:
        The branches with both; and collectives that no path orders.
    """
    with mock.patch.object(collectives, "BUCKET_BYTES", 1):
        graph = graph_over_nccl(kind, optimizer, hidden)[0]
    (_, *bodies), functions = bodies_of(graph)
    branches = [
        b for one in bodies for b in branches_of(one, functions, kernel)
    ]
    return {"branches": branches, "unordered": audit(graph)["unordered"]}


def branches_of(
    nodes: Any, functions: Mapping[str, Any], kernel: str
) -> list[Branch]:
    """A function, once for each replica that has messages and work in it."""
    messages, work = collections.defaultdict(list), collections.defaultdict(set)
    for node in nodes:
        if is_collective(node):
            messages[node.device].append(node.name)
        elif not holds(node, functions, is_collective) and holds(
            node, functions, lambda inner: inner.op == kernel
        ):
            work[node.device].add(node.name)
    parents = parents_of(nodes)
    return [
        Branch(
            work[device],
            [ancestors(name, parents) & work[device] for name in sent],
        )
        for device, sent in messages.items()
        if device in work
    ]


# ------------------------------------------------- several devices a process
EXTENDED = collective_all_reduce_strategy.CollectiveAllReduceExtended


def two_devices(_: Any, resolver: Any, worker: str) -> Any:
    return tuple(f"{worker}/device:CPU:{i}" for i in range(2)), "CPU"


def train_on_grid(names: list[str]) -> dict[str, Any]:
    """Trains a model with each of some optimizers, on two devices a process.

    TensorFlow's strategy for several workers takes one CPU of each process
    only. Here it is told of two, which is as near as CPUs come to hosts with
    several GPUs.
    """
    with mock.patch.object(EXTENDED, "_initialize_local_devices", two_devices):
        grid = tfkfac.MultiWorkerMirroredStrategy()
    assert grid.num_replicas_in_sync == 4
    results = {}
    for name in names:
        model = build(grid, name, [5])
        model.fit(batches(6), verbose=0)
        copies = [
            [np.asarray(v) for v in grid.experimental_local_results(w.value)]
            for w in model.trainable_variables
        ]
        results[name] = copies
    return results


def meetings(kind: str) -> dict[str, bool]:
    """Meetings of two, from two moments, and of one after the other."""
    rank = find_topology(strategy(kind)).process
    group = collectives.Communicator(rank, 2, "meetings")
    found = {
        "both": group.all_come("both", "7", 60),
        "moments": group.all_come("moments", str(rank), 60),
    }
    if rank == 0:
        found["alone"] = group.all_come("alone", "7", 0.1)
    group.all_come("after it", "7", 60)
    if rank == 1:
        found["alone"] = group.all_come("alone", "7", 60)
    return found
