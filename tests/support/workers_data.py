"""The rows that each worker sees, in jobs without a common seed."""

import contextlib
import pathlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac

BATCH = 16  # rows of all workers together
EPOCHS = 2
ROWS = 61  # the last batch is not full
X = np.arange(ROWS, dtype="float32")[:, None]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "KFAC": lambda: tfkfac.KFAC(0.01),
    "Adam": keras.optimizers.Adam,
}
# Inputs of each optimizer; more in a wider run.
CASES = {
    "KFAC": ("arrays", "dataset", "PyDataset, dictionary"),
    "Adam": ("arrays, steps", "dataset", "PyDataset"),
}
WIDE = (
    "arrays",
    "arrays, dictionary",
    "arrays, in batches",
    "dataset, distributed",
    "PyDataset, threads",
)
Rows = list[list[int]]  # by epoch


class Recorder(keras.layers.Layer):
    """Returns its inputs; keeps the rows of which they are made."""

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
    """Takes the rows of each epoch's training from a recorder."""

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
    """Batches of the rows, as arrays or dictionaries of them."""

    def __init__(
        self, as_dictionary: bool = False, order: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._as_dictionary = as_dictionary
        self._rows = X if order is None else X[order]

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = self._rows[BATCH * index : BATCH * (index + 1)]
        return ({"inputs": x} if self._as_dictionary else x), x


def fit(strategy: Any, data: dict[str, Any], optimizer: str = "Adam") -> Rows:
    """The rows that this worker sees, by epoch."""
    with strategy.scope():
        recorder = Recorder()
        input_layer = keras.Input((1,), name="inputs")
        outputs = keras.layers.Dense(1)(recorder(input_layer))
        model = keras.Model(input_layer, outputs)
        model.compile(OPTIMIZERS[optimizer](), "mse")
    epochs = Epochs(recorder)
    arguments = {"epochs": EPOCHS, "verbose": 0, "callbacks": [epochs]}
    model.fit(**(arguments | data))
    return epochs.rows


def inputs(name: str, strategy: Any) -> dict[str, Any]:
    """Arguments of `fit`."""
    kind, _, variant = name.partition(", ")
    if kind == "arrays":
        arguments: dict[str, Any] = {"x": X, "y": X, "batch_size": BATCH}
        arguments["validation_data"] = X[:BATCH], X[:BATCH]
        if variant == "steps":
            arguments["steps_per_epoch"] = -(-ROWS // BATCH)
        if variant == "dictionary":
            arguments["x"] = {"inputs": X}
        if variant == "in batches":
            arguments["shuffle"] = "batch"
        return arguments
    if kind == "dataset":
        data = dataset().shuffle(ROWS).batch(BATCH)
        if variant:
            data = strategy.experimental_distribute_dataset(data)
        return {"x": data}
    threads = 2 if variant == "threads" else 1
    return {"x": Batches(variant == "dictionary", workers=threads)}


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, X))


def see_rows(folder: str, is_wide: bool) -> dict[str, Any]:
    """Trains with all inputs; then with seeds that differ between workers."""
    strategy = tfkfac.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    results: dict[str, Any] = {
        "rows": {
            f"{name}, {optimizer}": fit(
                strategy, inputs(name, strategy), optimizer
            )
            for optimizer, cases in CASES.items()
            for name in (*cases, *(WIDE if is_wide else ()))
        },
        "seeds": seeds_of_layers(),
        "errors": {},
        "own rows": {},
    }
    tf.random.set_seed(index)
    for optimizer in OPTIMIZERS:
        for name in ("arrays", "dataset", "dataset, distributed"):
            results["errors"][f"{name}, {optimizer}"] = error(
                strategy, inputs(name, strategy), optimizer
            )
    workers = strategy.num_replicas_in_sync
    own = legitimate(pathlib.Path(folder), index, workers)
    for name, data in own.items():
        results["own rows"][name] = fit(strategy, data)
    results["warnings"] = warnings_of_labels(strategy, index)
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
        name: fit(strategy, inputs(name, strategy), "KFAC")
        for name in ("arrays", "dataset")
    }
    return {"error": text, "rows": rows}


def seeds_of_layers() -> list[int]:
    """Seeds that Keras draws, outside of the strategy's scope."""
    drawn = [keras.random.SeedGenerator().state.numpy()[0] for _ in range(3)]
    return [*map(int, drawn), random.randrange(10**9)]


def error(strategy: Any, data: dict[str, Any], optimizer: str) -> str:
    try:
        fit(strategy, data, optimizer)
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
    no_shuffle = {"x": X, "y": X, "batch_size": BATCH, "shuffle": False}
    return {
        "sharding off": {"x": part.with_options(options)},
        "files": {"x": lines.shuffle(ROWS).batch(BATCH)},
        "no shuffle": no_shuffle,
    }


def warnings_of_labels(strategy: Any, index: int) -> dict[str, list[str]]:
    """Warnings for a `PyDataset`, by how its rows are ordered."""
    orders = {
        "shuffled": np.random.default_rng(index).permutation(ROWS),
        "in order": np.arange(ROWS),
    }
    found = {}
    for name, order in orders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(strategy, {"x": Batches(order=order)})
        texts = [str(one.message) for one in caught]
        found[name] = [text for text in texts if "PyDataset" in text]
    return found
