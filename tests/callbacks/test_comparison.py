"""Workers with different weights or a different order of data."""

import contextlib
import functools
import io
import itertools
import pathlib
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.cluster import run
from tests.support.marks import with_slow
from tests.support.strategies import local_ranks
from tests.support.training import FEEDS, Training, build, fit
from tfkfac.callbacks import comparison
from tfkfac.cluster import watch
from tfkfac.compat.graphs import replica_copy


class Flip(keras.callbacks.Callback):
    """Changes the last bit of a weight on worker 1 before step 5."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 5 and local_ranks() == [1]:
            kernel = replica_copy(self.model.get_layer("hidden").kernel.value)
            kernel.assign(np.nextafter(kernel.numpy(), np.inf))


def pause(model: Any, case: Training, folder: str) -> str:
    """Stand still on worker 0 until a report; leave `fit` on it first.

    Worker 1 waits in a callback until worker 0 has left `fit`. Returns the
    standard error.
    """
    has_ended = pathlib.Path(folder) / "ended"
    (rank,) = local_ranks()
    stderr = io.StringIO()

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert condition()

    def stand_still(batch: int, logs: Any) -> None:
        if batch == 1 and rank == 0:
            wait_until(lambda: "wait_until (test" in stderr.getvalue())

    def end_last(epoch: int, logs: Any) -> None:
        if rank == 1:
            wait_until(has_ended.exists)

    callback = keras.callbacks.LambdaCallback(
        on_train_batch_begin=stand_still, on_epoch_end=end_last
    )
    with (
        mock.patch.object(watch, "_STALL_TIMEOUT_S", 1.0),
        contextlib.redirect_stderr(stderr),
    ):
        fit(model, case, callback, steps=slice(2))
    has_ended.touch()
    return stderr.getvalue()


def flip(optimizer: str, interval: int, folder: str) -> tuple[str, str]:
    """Train with a pause; return the error of a training with a changed bit."""
    options = {"only_layers": "hidden"} if optimizer == "KFAC" else {}
    case = Training(optimizer, feed=FEEDS["even"][:8], options=options)
    model = build(case)
    stderr = pause(model, case, folder)
    previous, comparison.INTERVAL = comparison.INTERVAL, interval
    try:
        with pytest.raises(RuntimeError) as error:
            fit(model, case, Flip())
    finally:
        comparison.INTERVAL = previous
    path = model.get_layer("hidden").kernel.path
    assert f"these checksums differ: {path}" in str(error.value)
    return str(error.value), stderr


# Interval of the comparison, and updates until the detection.
RUNS = {"two: KFAC": (3, 2 + 6), "two: FOSI": (100, 2 + 8)}


@pytest.mark.parametrize("name", with_slow(RUNS, "two: FOSI"))
def test_workers_that_differ(
    on_workers: Any, name: str, tmp_path: pathlib.Path
) -> None:
    """One changed bit of a weight raises the same error on all workers.

    Before that worker 0 stands still, which it prints, and leaves `fit` first:
    a worker may stop, or fail, in a callback after its last step.
    """
    interval, updates = RUNS[name]
    optimizer = name.partition(": ")[2]
    results = on_workers("two", flip, optimizer, interval, str(tmp_path))
    (error, stderr), (error_1, _) = results
    assert error == error_1
    assert "no longer have the same weights" in error
    assert f"After {updates} updates" in error
    assert "on worker 0" in error
    assert "on worker 1" in error
    # The first step may be reported as well.
    stall = (
        r"tfkfac: worker 0 at \S+: no step has ended for .* wait_until \(test"
    )
    assert re.search(stall, stderr)


# ------------------------------------------------------- the order of the data
BATCH = 16  # rows of all workers together
EPOCHS = 2
ROWS = 61  # the last batch is not full
X = np.arange(ROWS, dtype="float32")[:, None]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    # Without a block, whose trace takes seconds.
    "KFAC": lambda: tfkfac.KFAC(0.01, skip_layers=keras.layers.Dense),
    "Adam": keras.optimizers.Adam,
}
# Inputs of each optimizer.
CASES = {
    "KFAC": ["arrays"],
    "Adam": ["arrays, steps", "arrays, in batches", "dataset",
             "dataset, distributed", "PyDataset"],
}  # fmt: skip
# With other seeds on each worker.
REFUSED = {"KFAC": ("arrays",), "Adam": ("dataset", "dataset, distributed")}
Rows = list[list[int]]  # by epoch


class Recorder(keras.layers.Layer):
    """Returns its inputs, and records the rows that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def call(self, x: Any) -> Any:
        def record(rows: np.ndarray) -> np.float32:
            self.rows += [int(row) for row in rows[:, 0]]
            return np.float32(0)

        zero = tf.numpy_function(record, [x], tf.float32)
        zero.set_shape(())
        return x / ROWS + zero


class Epochs(keras.callbacks.Callback):
    """Takes the training rows of each epoch from a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.rows: Rows = []
        self._in_test = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._recorder.rows = []
        self._in_test = False

    def on_test_begin(self, logs: Any = None) -> None:
        self._take()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._take()

    def _take(self) -> None:
        if not self._in_test:
            # Keras tracks the lists of a layer.
            self.rows.append(list(self._recorder.rows))
        self._in_test = True


class Batches(keras.utils.PyDataset):
    """Batches of the rows in an order, as dictionaries."""

    def __init__(self, order: Any = slice(None)) -> None:
        super().__init__()
        self._rows = X[order]

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = self._rows[BATCH * index : BATCH * (index + 1)]
        return {"inputs": x}, x


@functools.cache
def compiled(strategy: Any, optimizer: str) -> tuple[keras.Model, Recorder]:
    """Return a compiled model, whose trace serves all inputs of a shape."""
    with strategy.scope():
        recorder = Recorder()
        input_layer = keras.Input((1,), name="inputs")
        outputs = keras.layers.Dense(1)(recorder(input_layer))
        model = keras.Model(input_layer, outputs)
        model.compile(OPTIMIZERS[optimizer](), "mse")
    return model, recorder


def fit_rows(
    strategy: Any, data: dict[str, Any], optimizer: str = "Adam"
) -> Rows:
    """Train; return the rows that this worker sees, by epoch."""
    model, recorder = compiled(strategy, optimizer)
    epochs = Epochs(recorder)
    arguments = {"epochs": EPOCHS, "verbose": 0, "callbacks": [epochs]}
    model.fit(**(arguments | data))
    return epochs.rows


ARRAYS: dict[str, Any] = {"x": X, "y": X, "batch_size": BATCH}
# Additional arguments of `fit` with arrays.
VARIANTS: dict[str, dict[str, Any]] = {
    "arrays": {"validation_data": (X[:BATCH], X[:BATCH])},
    "arrays, steps": {"x": {"inputs": X}, "steps_per_epoch": -(-ROWS // BATCH)},
    "arrays, in batches": {"x": {"inputs": X}, "shuffle": "batch"},
}


def inputs(name: str, strategy: Any) -> dict[str, Any]:
    if name in VARIANTS:
        return ARRAYS | VARIANTS[name]
    if name == "PyDataset":
        return {"x": Batches()}
    data = dataset().shuffle(ROWS).batch(BATCH)
    if name == "dataset, distributed":
        data = strategy.experimental_distribute_dataset(data)
    return {"x": data}


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, X))


def see_rows(folder: str) -> dict[str, Any]:
    """Train with many inputs; then with seeds that differ between workers."""
    strategy = tfkfac.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    results: dict[str, Any] = {"rows": {}, "errors": {}, "own rows": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer, cases in CASES.items():
            for name in cases:
                results["rows"][f"{name}, {optimizer}"] = fit_rows(
                    strategy, inputs(name, strategy), optimizer
                )
    results["warnings"] = {"in order": of_py_dataset(caught)}
    results["seeds"] = seeds_of_layers()
    tf.random.set_seed(index)
    for optimizer, cases in REFUSED.items():
        for name in cases:
            results["errors"][f"{name}, {optimizer}"] = error(
                strategy, inputs(name, strategy), optimizer
            )
    workers = strategy.num_replicas_in_sync
    own = legitimate(pathlib.Path(folder), index, workers)
    for name, data in own.items():
        results["own rows"][name] = fit_rows(strategy, data)
    order = np.random.default_rng(index).permutation(ROWS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_rows(strategy, {"x": Batches(order), "epochs": 1})
    results["warnings"]["shuffled"] = of_py_dataset(caught)
    results["overwritten"] = overwritten_rows(strategy)
    return results


def overwritten_rows(strategy: Any) -> list[int]:
    """Rows of an array that a step on batches of its views changes."""
    columns = 16  # 64 bytes: TensorFlow copies views that are not aligned so
    memory = np.zeros((ROWS + 1) * columns, "float32")
    start = -(memory.ctypes.data // memory.itemsize) % columns
    array = memory[start : start + ROWS * columns].reshape(ROWS, columns)
    array += X
    views = tf.data.Dataset.from_generator(
        lambda: (array[i : i + BATCH] for i in range(0, ROWS, BATCH)),
        output_signature=tf.TensorSpec((None, columns)),
    )

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(
            lambda batch: tf.reduce_sum(batch / ROWS), (next(iterator),)
        )

    iterator = iter(strategy.experimental_distribute_dataset(views))
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while True:
            step(iterator)
    return [int(row) for row in np.flatnonzero((array != X).any(axis=1))]


def see_rows_under_stock() -> dict[str, Any]:
    """Trains under TensorFlow's own strategy, without any seed."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    arguments = inputs("dataset", strategy)  # made before a seed is set
    text = error(strategy, arguments, "KFAC")
    rows = {
        name: fit_rows(strategy, inputs(name, strategy), "KFAC")
        for name in ("arrays", "dataset")
    }
    return {"error": text, "rows": rows}


def seeds_of_layers() -> list[int]:
    """Seeds that Keras draws, outside of the strategy's scope."""
    drawn = [keras.random.SeedGenerator().state.numpy()[0] for _ in range(3)]
    return [*map(int, drawn), random.randrange(10**9)]


def error(strategy: Any, data: dict[str, Any], optimizer: str) -> str:
    try:
        fit_rows(strategy, data, optimizer)
    except ValueError as raised:
        return str(raised)
    return "none"


def legitimate(
    folder: pathlib.Path, index: int, workers: int
) -> dict[str, dict[str, Any]]:
    """Data whose order may differ between workers."""
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    part = dataset().shard(workers, index).shuffle(ROWS).batch(BATCH // workers)
    files = tf.data.Dataset.list_files(f"{folder}/*.txt")
    lines = files.interleave(tf.data.TextLineDataset).map(
        lambda line: 2 * (tf.reshape(tf.strings.to_number(line), [1]),)
    )
    return {
        "sharding off": {"x": part.with_options(options)},
        "files": {"x": lines.shuffle(ROWS).batch(BATCH)},
        "no shuffle": ARRAYS | {"shuffle": False},
    }


def of_py_dataset(caught: list[Any]) -> list[str]:
    """Warnings about the order of the rows of a `PyDataset`."""
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "PyDataset" in text]


def check_rows(results: list[dict[str, Any]]) -> None:
    """Assert that each epoch has every row once, in a new order."""
    for name in results[0]["rows"]:
        by_worker = [result["rows"][name] for result in results]
        epochs = list(zip(*by_worker, strict=True))
        assert len(epochs) == EPOCHS
        for epoch in epochs:
            rows = sorted(itertools.chain(*epoch))
            assert rows == list(range(ROWS)), name
        assert epochs[0] != epochs[1], name


@pytest.mark.slow
def test_every_row_once_under_the_stock_strategy() -> None:
    """The first `fit` sets a common seed, and rejects earlier datasets."""
    results = run(see_rows_under_stock, workers=2)
    check_rows(results)
    for result in results:
        assert "must shuffle their data in the same order" in result["error"]


def test_every_row_once_in_each_epoch(tmp_path: pathlib.Path) -> None:
    """Without a seed of the user; needs a new cluster, which has no seed."""
    workers = 2
    for i in range(workers):
        lines = map(str, range(ROWS)[i::workers])
        (tmp_path / f"{i}.txt").write_text("\n".join(lines))
    results = run(see_rows, str(tmp_path), workers=workers)
    check_rows(results)
    rows = results[0]["rows"]
    assert rows["arrays, KFAC"][0] != rows["arrays, steps, Adam"][0]
    # Keras draws different seeds for the layers of each worker.
    for seeds in zip(*(result["seeds"] for result in results), strict=True):
        assert len(set(seeds)) == workers
    for name in results[0]["errors"]:
        texts = {result["errors"][name] for result in results}
        assert len(texts) == 1, name  # the same on all workers
        (text,) = texts
        assert "must shuffle their data in the same order" in text, name
        assert "keras.utils.set_random_seed" in text
        assert f"on worker {workers - 1}" in text
    for name in "files", "no shuffle":
        by_worker = [result["own rows"][name] for result in results]
        for epoch in zip(*by_worker, strict=True):
            assert sorted(itertools.chain(*epoch)) == list(range(ROWS)), name
    for index, result in enumerate(results):
        for epoch in result["own rows"]["sharding off"]:
            assert set(epoch) <= set(range(index, ROWS, workers))
        assert len(result["warnings"]["shuffled"]) == 1
        assert not result["warnings"]["in order"]
        assert not result["overwritten"]
