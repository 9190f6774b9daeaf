"""Data sets in memory: digits, idx files, TensorFlow Datasets."""

import argparse
import dataclasses
import gzip
import pathlib
import sys
from typing import Any, Self

import numpy as np
import tensorflow as tf

HELD_OUT_DIGITS = 360
ENLARGED, SIDE = 20, 28  # pixels, of a moved digit and of its frame
# One array or a dictionary of arrays; the first axis is the examples.
Arrays = Any


@dataclasses.dataclass(frozen=True)
class Split:
    """Inputs and targets; unsigned integers among the inputs are pixels."""

    x: Arrays
    y: Arrays

    def __len__(self) -> int:
        return len(tf.nest.flatten(self.y)[0])

    def first(self, count: int) -> "Split":
        """Return the first examples."""
        x, y = tf.nest.map_structure(lambda a: a[:count], (self.x, self.y))
        return Split(x, y)


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and test examples; pixels are in [0, brightest]."""

    train: Split
    test: Split
    brightest: int = 255

    def first(self, count: int) -> Self:
        """Return the data with at most `count` examples in each split."""
        train, test = self.train.first(count), self.test.first(count)
        return dataclasses.replace(self, train=train, test=test)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of an image."""
        return tuple(self.train.x.shape[1:])

    @property
    def num_classes(self) -> int:
        """Number of classes of integer labels."""
        return int(self.train.y.max()) + 1

    def train_batches(self, batch_size: int, seed: int) -> tf.data.Dataset:
        """Return full batches, shuffled by the seed and the epoch only."""
        order = tf.data.Dataset.range(len(self.train))
        order = order.shuffle(len(self.train), seed=seed)
        order = order.batch(batch_size, drop_remainder=True)
        return self._batches(self.train, order)

    def test_batches(self, batch_size: int = 500) -> tf.data.Dataset:
        """Return batches of the test examples, in their order."""
        order = tf.data.Dataset.range(len(self.test)).batch(batch_size)
        return self._batches(self.test, order)

    def _batches(self, split: Split, order: tf.data.Dataset) -> tf.data.Dataset:
        # Pixels stay bytes in memory: a quarter of float32.
        arrays = tf.nest.map_structure(tf.constant, (split.x, split.y))

        def scale(array: tf.Tensor) -> tf.Tensor:
            if not array.dtype.is_unsigned:
                return array
            return tf.cast(array, tf.float32) / self.brightest

        def batch(rows: tf.Tensor) -> tuple[Any, Any]:
            x, y = tf.nest.map_structure(lambda a: tf.gather(a, rows), arrays)
            return tf.nest.map_structure(scale, x), y

        batches = order.map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE)


def load(options: argparse.Namespace) -> Data:
    """Load the images of `--dataset` and `--data-dir`."""
    name, directory = options.dataset, options.data_dir
    if name == "digits":
        return digits()
    if name == "moved_digits":
        return moved_digits()
    if directory is not None and has_idx_files(directory):
        return idx_images(directory)
    return tfds_images(name, directory)


def digits() -> Data:
    """Return scikit-learn's digits, 8x8 pixels, in a fixed split."""
    from sklearn import datasets, model_selection

    sets = datasets.load_digits()
    images = sets.images.astype(np.uint8)[..., np.newaxis]
    x, test_x, y, test_y = model_selection.train_test_split(
        images,
        sets.target,
        test_size=HELD_OUT_DIGITS,
        stratify=sets.target,
        random_state=0,
    )
    return Data(Split(x, y), Split(test_x, test_y), brightest=16)


def moved_digits(examples: int = 20_000, held_out: int = 5_000) -> Data:
    """Return the digits, enlarged to 20x20, at random places of 28x28."""
    source, random = digits(), np.random.RandomState(0)

    def move(split: Split, count: int) -> Split:
        chosen = random.randint(len(split), size=count)
        large = tf.image.resize(split.x / 16, (ENLARGED, ENLARGED), "bicubic")
        images = np.round(255 * np.clip(large.numpy(), 0, 1)).astype(np.uint8)
        tops, lefts = random.randint(SIDE - ENLARGED + 1, size=(2, count))
        frames = np.zeros((count, SIDE, SIDE, 1), np.uint8)
        for frame, image, top, left in zip(
            frames, images[chosen], tops, lefts, strict=True
        ):
            frame[top : top + ENLARGED, left : left + ENLARGED] = image
        return Split(frames, split.y[chosen])

    return Data(move(source.train, examples), move(source.test, held_out))


def idx_path(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of an idx file, compressed (`.gz`) if that exists."""
    packed = directory / f"{name}-ubyte.gz"
    return packed if packed.exists() else directory / f"{name}-ubyte"


def has_idx_files(directory: pathlib.Path) -> bool:
    """Return True if a directory has images in MNIST's format."""
    return idx_path(directory, "train-images-idx3").exists()


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Read an idx file of unsigned bytes."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    start = 4 + 4 * content[3]  # header: 4 bytes, then the size of each axis
    shape = np.frombuffer(content[4:start], ">u4").astype(int)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def idx_images(directory: pathlib.Path) -> Data:
    """Read four idx files: images and labels, to train and to test."""
    splits = []
    for prefix in ("train", "t10k"):
        images = read_idx(idx_path(directory, f"{prefix}-images-idx3"))
        labels = read_idx(idx_path(directory, f"{prefix}-labels-idx1"))
        splits.append(Split(images[..., np.newaxis], labels))
    train, test = splits
    return Data(train, test)


def tfds_images(name: str, directory: pathlib.Path | None) -> Data:
    """Load a set of TensorFlow Datasets with images of one size."""
    import tensorflow_datasets as tfds

    try:
        splits = tfds.load(
            name,
            split=["train", "test"],
            data_dir=directory,
            batch_size=-1,
            as_supervised=True,
        )
    except Exception as error:  # depends on the data set
        sys.exit(
            f"--dataset {name}: TensorFlow Datasets cannot load it: {error}\n"
            "Use digits, moved_digits, or --data-dir with the idx files of "
            "mnist, fashion_mnist or kmnist."
        )
    train, test = (Split(*map(np.asarray, split)) for split in splits)
    return Data(train, test)
