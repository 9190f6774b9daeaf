"""Data sets in memory: digits, idx files."""

import dataclasses
import gzip
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

HELD_OUT_DIGITS = 360
ENLARGED, SIDE = 20, 28  # pixels, of a moved digit and of its frame
# One array or a dictionary of arrays; the first axis is the examples.
Arrays = Any


@dataclasses.dataclass(frozen=True)
class Split:
    """Inputs and targets."""

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
    """Training and test examples."""

    train: Split
    test: Split


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
    return Data(Split(x, y), Split(test_x, test_y))


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
