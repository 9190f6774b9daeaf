"""What compat relies on in the data of a `fit`."""

import pathlib

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


@contract("compat.data.global_seed", "`global_seed` is that of `set_seed`.")
def test_global_seed(seed: int) -> None:
    assert global_seed() == seed


@contract(
    "compat.data.shuffle_seeds",
    "Datasets have `_inputs`, `_functions`, and seeds of a shuffle.",
)
def test_shuffle_seeds(seed: int, tmp_path: pathlib.Path) -> None:
    rows = tf.data.Dataset.from_tensor_slices(X)
    assert shuffle_seeds(rows.batch(2)) == []
    shuffled = rows.shuffle(12, seed=7).map(lambda x: x).batch(2).prefetch(1)
    assert shuffle_seeds(shuffled) == [(seed, 7)]
    inside = tf.data.Dataset.range(2).interleave(lambda _: rows.shuffle(3, 8))
    assert shuffle_seeds(inside.batch(2)) == [(seed, 0)]
    chosen = tf.data.Dataset.sample_from_datasets([rows, rows], seed=9)
    assert shuffle_seeds(chosen.batch(2)) == [(seed, 9)]
    files = tf.data.Dataset.from_tensor_slices([str(tmp_path / "rows.txt")])
    lines = files.interleave(tf.data.TextLineDataset).shuffle(12, seed=7)
    assert shuffle_seeds(lines) == []
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.OFF
    assert shuffle_seeds(shuffled.with_options(options)) == []
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.DATA
    assert shuffle_seeds(lines.with_options(options)) == [(seed, 7)]


@contract(
    "compat.data.reshuffle_arrays",
    "Arrays are shuffled by `tf.random.shuffle`, the same in each epoch.",
)
@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_reshuffle_arrays(seed: int, shuffle: bool | str) -> None:
    def orders(steps: int | None) -> list[list[int]]:
        """The rows of each epoch, as a model sees them."""
        rows: list[int] = []

        class Rows(keras.layers.Layer):
            def call(self, x: tf.Tensor) -> tf.Tensor:
                if tf.executing_eagerly() and tf.is_tensor(x):
                    rows.extend(int(v) for v in x[:, 0])
                return x

            def compute_output_shape(self, shape: tuple) -> tuple:
                return shape

        model = keras.Sequential(
            [keras.Input((1,)), Rows(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(
            X,
            X,
            batch_size=4,
            epochs=3,
            steps_per_epoch=steps,
            shuffle=shuffle,
            verbose=0,
        )
        seen = np.array(rows[-36:]).reshape(3, 12)
        return seen.tolist()

    assert orders(None)[0] == orders(None)[1]
    for steps in None, 3:
        with reshuffle_arrays(seed):
            first, again = orders(steps), orders(steps)
        assert first == again
        assert first[0] != first[1] != first[2]
        for order in first:
            assert sorted(order) == list(range(12))
    assert orders(None)[0] == orders(None)[1]


@contract(
    "compat.data.label_checksums",
    "The first batch of a `PyDataset` is read before training.",
)
def test_label_checksums() -> None:
    class Batches(keras.utils.PyDataset):
        def __init__(self, inputs: float, labels: float) -> None:
            super().__init__()
            self._batch = {"x": X + np.float32(inputs)}, X + labels
            self.read = 0

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[dict, np.ndarray]:
            self.read += 1
            inputs, labels = self._batch
            return inputs, labels + index

    found = []
    for change in (0, 0), (1, 0), (0, 1):
        input_layer = keras.Input((1,), name="x")
        outputs = keras.layers.Dense(1)(input_layer)
        model = keras.Model({"x": input_layer}, outputs)
        model.compile("sgd", "mse")
        with label_checksums() as checksums:
            model.fit(Batches(*change), verbose=0)
        assert len(checksums) == 1
        found += checksums
    assert found[0] == found[1] != found[2]


BATCHES = {
    "one component": (np.ones((3, 2), "float32"),),
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
