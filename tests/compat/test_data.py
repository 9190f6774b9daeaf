"""Internals of the data of a `fit`."""

import pathlib
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.data import (
    Policy,
    copy_generated,
    global_seed,
    label_checksums,
    reshuffle_arrays,
    shuffle_seeds,
)

X = np.arange(12, dtype="float32")[:, None]


@pytest.fixture
def seed() -> int:
    """A seed of TensorFlow; no other test relies on there being none."""
    tf.random.set_seed(5)
    return 5


@contract(
    "compat.data.shuffle_seeds",
    "Datasets have `_inputs`, `_functions`, and seeds of a shuffle; "
    "`global_seed` is that of `set_seed`.",
)
def test_shuffle_seeds(seed: int, tmp_path: pathlib.Path) -> None:
    def with_policy(dataset: Any, policy: Any) -> Any:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)

    assert global_seed() == seed
    rows = tf.data.Dataset.from_tensor_slices(X)
    shuffled = rows.shuffle(12, seed=7).map(lambda x: x).batch(2).prefetch(1)
    inside = tf.data.Dataset.range(2).interleave(lambda _: rows.shuffle(3, 8))
    chosen = tf.data.Dataset.sample_from_datasets([rows, rows], seed=9)
    files = tf.data.Dataset.from_tensor_slices([str(tmp_path / "rows.txt")])
    lines = files.interleave(tf.data.TextLineDataset).shuffle(12, seed=7)
    for dataset, seeds in (
        (rows.batch(2), []),
        (shuffled, [(seed, 7)]),
        (inside.batch(2), [(seed, 0)]),
        (chosen.batch(2), [(seed, 9)]),
        (lines, []),
        (with_policy(shuffled, Policy.OFF), []),
        (with_policy(lines, Policy.DATA), [(seed, 7)]),
    ):
        assert shuffle_seeds(dataset) == seeds


class Rows(keras.layers.Layer):
    """Record the rows of each eager call of all these layers."""

    rows: ClassVar[list[int]] = []

    def call(self, x: Any) -> Any:
        if tf.executing_eagerly() and tf.is_tensor(x):
            self.rows.extend(int(v) for v in x[:, 0])
        return x

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@contract(
    "compat.data.reshuffle_arrays",
    "Arrays are shuffled by `tf.random.shuffle`, the same in each epoch.",
)
def test_reshuffle_arrays(seed: int) -> None:
    model = keras.Sequential([keras.Input((1,)), Rows(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)

    def orders(shuffle: Any, steps: int | None) -> list[list[int]]:
        """The rows of each epoch, as the model sees them."""
        model.fit(X, X, 4, 3, 0, shuffle=shuffle, steps_per_epoch=steps)
        return np.reshape(Rows.rows[-36:], (3, 12)).tolist()

    first, again, _ = orders(True, None)
    assert first == again
    for arguments in (True, None), ("batch", 3):
        with reshuffle_arrays(seed):
            epochs, repeated = orders(*arguments), orders(*arguments)
        assert epochs == repeated
        assert epochs[0] != epochs[1] != epochs[2]
        for order in epochs:
            assert sorted(order) == list(range(12))


@contract(
    "compat.data.label_checksums",
    "The first batch of a `PyDataset` is read before training.",
)
def test_label_checksums() -> None:
    class Batches(keras.utils.PyDataset):
        def __init__(self, inputs: float, labels: float) -> None:
            super().__init__()
            self._batch = X + np.float32(inputs), X + labels

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            inputs, labels = self._batch
            return inputs, labels + index

    result = []
    for change in (0, 0), (1, 0), (0, 1):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        with label_checksums() as checksums:
            model.fit(Batches(*change), verbose=0)
        assert len(checksums) == 1
        result += checksums
    assert result[0] == result[1] != result[2]


BATCHES = {
    "dictionary": {"x": np.ones((3, 2), "float32"), "s": np.array(["a"] * 3)},
    "array": np.ones(2, "bool"),
    "dtypes": (np.ones(2, "uint8"), np.ones(2, "float16"), np.ones(2, int)),
}


@contract("compat.data.copy_generated", "The dtypes and structures of batches.")
@pytest.mark.parametrize("name", BATCHES)
def test_copies_have_the_structure_of_the_batch(name: str) -> None:
    batch = BATCHES[name]
    signature = tf.nest.map_structure(
        lambda x: tf.TensorSpec((None, *x.shape[1:]), tf.as_dtype(x.dtype)),
        tf.nest.map_structure(tf.constant, batch),
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([batch]), output_signature=signature
    )
    copied = copy_generated(dataset)
    assert copied is not dataset
    assert copied.element_spec == dataset.element_spec
    tf.nest.map_structure(
        np.testing.assert_array_equal, next(iter(copied)), next(iter(dataset))
    )
