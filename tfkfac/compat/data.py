"""Order of the data in `fit`: seeds of pipelines, shuffling of arrays."""

import collections
import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from tensorflow.python.eager import context

from tfkfac.compat.overrides import Below, overridden

# With these sources, `AutoShardPolicy.AUTO` divides files among workers.
_READERS = (
    "ArrayRecordDataset",
    "FixedLengthRecordDataset",
    "RecordIODataset",
    "SSTableDataset",
    "TextLineDataset",
    "TFRecordDataset",
)
Policy = tf.data.experimental.AutoShardPolicy


def global_seed() -> int | None:
    """Return `global_seed` of TensorFlow's context; None if no seed is set."""
    return context.global_seed()


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Return the seeds that determine which rows of a pipeline a worker takes.

    A shuffle without a seed has (0, 0). For a shuffle inside a function only
    the global seed is known. The list is empty if the workers have different
    data: with `AutoShardPolicy.OFF`, or if they read different files.

    This relies on `_inputs()` and `_functions()` of a dataset, and on `_seed`
    and `_seed2` of a shuffle or of a choice among several datasets.
    """
    datasets = list(_upstream_datasets(dataset))
    seeds = [(d._seed, d._seed2) for d in datasets if hasattr(d, "_seed2")]
    for graph in _graphs(datasets):
        if graph.seed and any(
            op.startswith("ShuffleDataset") for op in _operation_types(graph)
        ):
            seeds.append((graph.seed, 0))
    policy = dataset.options().experimental_distribute.auto_shard_policy
    by_file = any(
        reader in name for name in _type_names(datasets) for reader in _READERS
    )
    if policy != Policy.DATA and (policy != Policy.AUTO or by_file):
        return []
    return [(int(first), int(second)) for first, second in seeds]


def copy_generated(dataset: Any) -> Any:
    """Copy each element of a dataset with a "GeneratorDataset" operation.

    TensorFlow does not copy the arrays of a Python generator. An operation on a
    slice, such as the rows of a worker, may write its output into the user's
    array. Composite tensors and variants stay as they are.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if "GeneratorDataset" not in _type_names(list(_upstream_datasets(dataset))):
        return dataset
    is_tuple = type(dataset.element_spec) is tuple  # `map` unpacks tuples
    return dataset.map(
        lambda *element: tf.nest.map_structure(
            lambda x: (
                tf.raw_ops.DeepCopy(x=x)
                if isinstance(x, tf.Tensor) and x.dtype.is_numpy_compatible
                else x
            ),
            element if is_tuple else element[0],
        )
    )


def _upstream_datasets(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for source in dataset._inputs():
        yield from _upstream_datasets(source)


def _graphs(datasets: Iterable[tf.data.Dataset]) -> Iterator[tf.Graph]:
    """Yield the graphs of the functions of datasets."""
    for dataset in datasets:
        for function in dataset._functions():
            yield function.function.graph


def _operation_types(graph: tf.Graph) -> list[str]:
    """Return the types of all operations, including nested functions."""
    content = graph.as_graph_def()
    bodies = [function.node_def for function in content.library.function]
    return [node.op for body in (content.node, *bodies) for node in body]


def _type_names(datasets: Sequence[tf.data.Dataset]) -> set[str]:
    """Return the names of dataset classes and of the operations they run."""
    names = {type(dataset).__name__ for dataset in datasets}
    return names.union(*map(_operation_types, _graphs(datasets)))


@contextlib.contextmanager
def reshuffle_arrays(seed: int) -> Iterator[None]:
    """Make `fit` shuffle arrays in a new order each epoch, equal on workers.

    After `tf.random.set_seed`, Keras repeats the order of the first epoch,
    because `tf.random.shuffle` restarts with each iterator. Here the order
    depends on the seed and the number of earlier iterators.

    This relies on `TFEpochIterator._get_iterator` being called once for each
    iterator, after the previous iterator has ended.
    """
    iterators: collections.Counter[int] = collections.Counter()

    def get_iterator(below: Below, epochs: Any) -> Any:
        iterators[id(epochs.data_adapter)] += 1
        return below(epochs)

    def get_tf_dataset(below: Below, adapter: Any) -> Any:
        def shuffle(_: Below, indices: tf.Tensor) -> tf.Tensor:
            number = tf.numpy_function(
                lambda: np.int64(iterators[id(adapter)]), [], tf.int64
            )
            number.set_shape(())
            # `indices[0]` gives each batch its seed, for `shuffle="batch"`.
            return tf.random.experimental.stateless_shuffle(
                indices, [seed + number, indices[0]]
            )

        with overridden(tf.random, "shuffle", shuffle):
            return below(adapter)

    with (
        overridden(ArrayDataAdapter, "get_tf_dataset", get_tf_dataset),
        overridden(TFEpochIterator, "_get_iterator", get_iterator),
    ):
        yield


@contextlib.contextmanager
def label_checksums() -> Iterator[list[int]]:
    """Collect the checksum of the labels of the first batch of a `PyDataset`.

    A batch without labels is used as a whole. This relies on Keras passing the
    batches that it reads for their shapes, before training and in the thread of
    `fit`, to `_standardize_batch`.
    """
    checksums: list[int] = []

    def standardize(below: Below, adapter: Any, batch: Any) -> Any:
        batch = below(adapter, batch)
        if not checksums:
            has_labels = isinstance(batch, tuple) and len(batch) > 1
            leaves = keras.tree.flatten(batch[1] if has_labels else batch)
            content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
            checksums.append(zlib.crc32(content))
        return batch

    with overridden(PyDatasetAdapter, "_standardize_batch", standardize):
        yield checksums
