"""Internals of strategies, with one process and with several."""

import collections
import ctypes
import functools
import itertools
import signal
import traceback
from collections.abc import Iterator
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tests.support.cluster import run
from tests.support.strategies import STOCK, strategy
from tfkfac.cluster.strategy import MultiWorkerMirroredStrategy
from tfkfac.compat.strategies import (
    is_repaired,
    keep_handler,
    local_devices,
    order_by_replica,
    repair,
    summing_replicas,
    uses_ring,
)
from tfkfac.distributed import topology
from tfkfac.distributed.collectives import sum_dtype
from tfkfac.distributed.topology import find_topology

BATCH, UNEVEN = 8, 13
ROWS = 150  # the last batch is not full
NUMBERS = np.arange(ROWS, dtype="float32")[:, None]


# -------------------------------------------------------------- on a worker
def build_two_heads() -> Any:
    """Dictionaries in and out, with dtypes that have no mean."""
    inputs = {
        "image": keras.Input((2, 2), dtype="uint8", name="image"),
        "word": keras.Input((1,), dtype="string", name="word"),
    }
    words = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    pixels = layers.Flatten()(layers.Rescaling(1 / 255)(inputs["image"]))
    joined = layers.Concatenate()([pixels, words(inputs["word"])])
    number = layers.Dense(1, name="number")(joined)
    label = layers.Dense(2, "softmax", name="label")(joined)
    model = keras.Model(inputs, {"number": number, "label": label})
    model.compile(
        "adam",
        {"number": "mse", "label": "sparse_categorical_crossentropy"},
        metrics={"number": ["mae"], "label": ["accuracy"]},
    )
    return model


def train(rows: int = 16) -> dict[str, Any]:
    """Fit; evaluate and predict with an uneven batch; all with dictionaries."""
    keras.utils.set_random_seed(0)
    with strategy().scope():
        model = build_two_heads()
    sizes = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(*structures(rows), shuffle=False, **sizes)
    features, targets = structures(UNEVEN)
    return {
        "history": history.history,
        "metrics": model.evaluate(features, targets, return_dict=True, **sizes),
        "outputs": model.predict(features, **sizes),
        "expected_outputs": tf.nest.map_structure(
            np.array, model(tf.nest.map_structure(tf.constant, features))
        ),
        "weights": model.get_weights(),
    }


def structures(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    features = {
        "image": rng.integers(256, size=(rows, 2, 2)).astype("uint8"),
        "word": tf.constant(rng.choice(["a", "b"], size=(rows, 1))),
    }
    targets = {
        "number": rng.normal(size=(rows, 1)).astype("float32"),
        "label": rng.integers(2, size=(rows, 1)),
    }
    return features, targets


class Batches(keras.utils.PyDataset):
    """Batches of row numbers, more than Keras' queue of 10."""

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = slice(BATCH * index, BATCH * (index + 1))
        return NUMBERS[rows], NUMBERS[rows]


def generator() -> Iterator[tuple[Any, Any]]:
    return (Batches()[i] for i in range(len(Batches())))


class Recorder(keras.Model):
    """Record the row numbers of all training and test steps."""

    rows: ClassVar[collections.Counter[float]] = collections.Counter()

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def record(self, data: Any) -> None:
        tf.numpy_function(lambda x: self.rows.update(x[:, 0]), [data[0]], [])

    def train_step(self, data: Any) -> Any:
        self.record(data)
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.record(data)
        return super().test_step(data)


def seen_rows() -> list[dict[int, int]]:
    """Count the rows that `fit`, validation and `evaluate` see.

    callbacks/test_comparison.py has two workers, arrays and datasets.
    """
    with repair(strategy()).scope():
        model = Recorder()
        model.compile("adam", "mse")
    other = np.full((2, 1), -1.0)

    def count(method: Any, *args: Any, **kwargs: Any) -> dict[int, int]:
        model.rows.clear()
        method(*args, verbose=0, **kwargs)
        return {int(row): n for row, n in model.rows.items() if row >= 0}

    return [
        count(model.fit, Batches()),
        count(model.evaluate, Batches(workers=2)),
        count(model.fit, generator()),
        count(model.fit, other, other, validation_data=(generator(), None)),
    ]


def reductions() -> list[Any]:
    """Call `reduce` in many ways, on the values 1, 2, ... of the replicas."""
    replicas = repair(strategy())

    def by_replica(shape: Any = (), uneven: bool = False) -> Any:
        def make() -> Any:
            context = tf.distribute.get_replica_context()
            number = context.replica_id_in_sync_group + 1
            rows = [number] if uneven else []
            return tf.ones([*rows, *shape]) * tf.cast(number, tf.float32)

        return replicas.run(make)

    @tf.function
    def in_graph() -> Any:
        return replicas.reduce("MEAN", by_replica(), axis=0)

    mean, total = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM
    found = [
        replicas.reduce("SUM", by_replica((2,)))[0],
        replicas.reduce(reduce_op=total, value=by_replica()),
        replicas.reduce("mean", by_replica(), axis=0),
        replicas.reduce(mean, by_replica(uneven=True), axis=0),
        in_graph(),
        replicas.reduce("MEAN", tf.constant([1.0, 2.0]))[1],
    ]
    return [float(value) for value in found]


def orders(apart: bool) -> dict[str, list[str]]:
    """Return the control inputs of each print and lookup of two replicas.

    Those of the first replica come first. Each replica prints in the forward
    and backward pass, on a device of the user and in another scope, and looks
    up a value in a table.
    """
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], [2, 3]), -1
    )

    @tf.custom_gradient
    def loud(x: Any) -> Any:
        def backwards(upstream: Any) -> Any:
            tf.print("backwards")
            return upstream

        return x, backwards

    def step(x: Any) -> Any:
        if apart:
            order_by_replica(strategy().extended.worker_devices)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loud(x)
        tf.print("first")
        with tf.device("CPU:0"):
            tf.print("placed")
        with tf.name_scope("out/of/it/"):
            tf.print("named")
        return tape.gradient(y, x), table.lookup(tf.constant(0))

    @tf.function
    def run() -> Any:
        return strategy().run(step, args=(tf.constant(1.0),))

    operations = run.get_concrete_function().graph.get_operations()
    found = {
        operation.name: operation
        for operation in operations
        if operation.type in ("PrintV2", "LookupTableFindV2")
    }
    return {
        name: [o.name for o in operation.control_inputs if o.name in found]
        for name, operation in found.items()
    }


# --------------------------------------------------------------------- tests
def assert_same_everywhere(workers: list[Any]) -> None:
    first, *others = map(tf.nest.flatten, workers)
    for other in others:
        for got, want in zip(other, first, strict=True):
            np.testing.assert_array_equal(got, want)


def assert_as_single(workers: list[Any], single: Any) -> None:
    """But for the evaluated loss: Keras averages it over replicas."""
    for part in ("history", "outputs", "weights"):
        assert_all_close([worker[part] for worker in workers], single[part])


def assert_all_close(workers: list[Any], want: Any) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    for worker in workers:
        tf.nest.map_structure(close, worker, want)


def test_equals_a_single_process(on_workers: Any) -> None:
    workers, single = on_workers("two", train), train()
    assert_same_everywhere(workers)
    assert_as_single(workers, single)
    # Every row is predicted once and in order; metrics average over rows.
    want = single["expected_outputs"]
    assert_all_close([single["outputs"]], want)
    _, targets = structures(UNEVEN)
    error = np.abs(want["number"] - targets["number"]).mean()
    for worker in workers:
        assert worker["metrics"]["number_mae"] == pytest.approx(error, rel=1e-5)


@contract(
    "compat.strategies.build_from_specs",
    "`fit` and `evaluate` call `_maybe_symbolic_build` with an iterator that"
    " has a `_distributed_dataset`.",
)
@pytest.mark.parametrize("where", ["mirrored"])
def test_every_row_once(on_workers: Any, where: str) -> None:
    (counts,) = on_workers(where, seen_rows)
    assert counts == [dict.fromkeys(range(ROWS), 1)] * 4


@pytest.mark.parametrize("where", ["two", "mirrored"])
def test_reduce(on_workers: Any, where: str) -> None:
    for result in on_workers(where, reductions):
        assert result == pytest.approx([3, 3, 1.5, 5 / 3, 1.5, 2])


@pytest.mark.slow
def test_repaired_stock_strategies(on_workers: Any) -> None:
    """Strings, and a worker without rows.

    In separate clusters: a process can have one such strategy only.
    """
    stock = {"environment": {STOCK: "yes"}}
    repaired = run(train, 5, workers=2, **stock)
    assert_same_everywhere(on_workers("two", train, 5) + repaired)
    mirrored = run(train, workers=1, devices=2, **stock)
    assert_as_single(mirrored, train())


def test_repair() -> None:
    """`repair` is idempotent and does not change other strategies."""
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    assert repair(other) is other
    assert not is_repaired(other)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert not is_repaired(strategy)
    assert repair(strategy) is strategy
    reduce = strategy.reduce
    assert is_repaired(repair(strategy))
    assert strategy.reduce is reduce
    (device,) = local_devices(strategy)
    assert "CPU:0" in device.upper()


@contract(
    "compat.strategies.call_unconverted",
    "AutoGraph does not convert a function with the mark of"
    " `autograph_artifact`, but functions that it calls.",
)
def test_autograph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and `reduce` are not converted; the function of a replica is."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    names: set[str] = set()

    @tf.autograph.experimental.do_not_convert
    def record(*values: Any, **_: Any) -> Any:
        names.update(frame.name for frame in traceback.extract_stack())
        return values[-1]

    monkeypatch.setattr(tf.distribute.Strategy, "reduce", record)
    strategy = MultiWorkerMirroredStrategy()

    def replica(x: Any) -> Any:
        record(x)
        if x < 0:
            x = -x
        return x

    @tf.function
    def step(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=(x,)))

    assert step(tf.constant(-2.0)) == 2
    converted = {name for name in names if name.startswith("tf__")}
    assert converted == {"tf__step", "tf__replica"}


Implementation = tf.distribute.experimental.CommunicationImplementation


@contract(
    "compat.strategies.uses_ring",
    "`_communication_options` of `extended` are those of the user.",
)
@pytest.mark.parametrize(
    ("implementation", "hint"),
    [
        (Implementation.AUTO, "nccl"),
        (Implementation.NCCL, "nccl"),
        (Implementation.RING, "ring"),
    ],
)
def test_hint_on_gpus(
    implementation: Any, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL, unless the user or TensorFlow (here on CPUs) chose its ring."""
    assert uses_ring(tf.distribute.MirroredStrategy(["CPU:0"]))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementation
    )
    strategy = MultiWorkerMirroredStrategy(communication_options=options)
    gpus = ("/device:GPU:0", "/device:GPU:1")
    monkeypatch.setattr(topology, "local_devices", lambda strategy: gpus)
    monkeypatch.setattr(
        type(strategy), "num_replicas_in_sync", property(lambda self: 2)
    )
    assert find_topology(strategy).hint == hint
    assert sum_dtype(tf.bfloat16, hint) == tf.float32


@contract(
    "compat.strategies.summing_replicas",
    "The gradient of `ReplicaContext.all_reduce` is an `all_reduce`.",
)
def test_gradients_of_sums_over_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def gradient(kind: str) -> tf.Tensor:
        x = tf.constant([1.0, 2.0])
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = context.all_reduce(kind, x)
        with summing_replicas(lambda t: 5 * t):
            return tape.gradient(total, x)

    for kind in ("SUM", "MEAN"):  # of one replica
        result = strategy.run(
            tf.function(gradient, autograph=False), args=(kind,)
        )
        assert result.numpy().tolist() == [5, 5]


@contract(
    "compat.strategies.keep_handler",
    "`PyOS_getsig` and `PyOS_setsig` get and set C handlers.",
)
def test_keep_handler() -> None:
    """Also for a handler that was set in C, unknown to Python."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    seen: list[int] = []
    before = signal.signal(
        signal.SIGUSR2, lambda number, _: seen.append(number)
    )
    try:
        with keep_handler(signal.SIGUSR2):
            libc.signal(signal.SIGUSR2, signal.SIG_IGN.value)
            signal.raise_signal(signal.SIGUSR2)
            assert not seen
        signal.raise_signal(signal.SIGUSR2)
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@contract(
    "compat.strategies.order_by_replica",
    "Resolvers change the order of operations; the name scope or the device"
    " tells the replica.",
)
@pytest.mark.parametrize(
    "apart", [False, True], ids="mirrored: apart={}".format
)
def test_stateful_operations_are_ordered_per_replica(
    on_workers: Any, apart: bool
) -> None:
    """Program order per replica; else one common order."""
    (result,) = on_workers("mirrored", orders, apart)
    names = list(result)
    assert len(names) == 10, names
    before = {after: [first] for first, after in itertools.pairwise(names)}
    # Lookups of a table are ordered per table, except in replica 1.
    del before[names[4]], before[names[5]]
    if not apart:
        before |= {names[5]: [names[3]], names[9]: [names[4]]}
    assert result == {name: before.get(name, []) for name in names}
