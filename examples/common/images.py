"""Image-classification data: embedded digits, idx files, any TFDS data set."""

import argparse
import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from common.data import ImageData, Split
from common.errors import UsageError
from common.idx_images import IdxConfig, IdxError, IdxImages
from common.tfds_sets import UnavailableError, named_builder, prepare

IDX_DATASETS = ("fashion_mnist", "kmnist", "mnist")
HELD_OUT_DIGITS = 360
MOVED_DIGITS, HELD_OUT_MOVED_DIGITS = 20_000, 5_000
ENLARGED, SIDE = 20, 28  # pixels
TEST_SPLITS = ("test", "validation")
# For data sets whose images differ in size.
COMMON_SIZE = (64, 64)

CHOICES = f"""\
Data sets to choose from:
  digits        1,797 images of 8x8 pixels, part of scikit-learn
  moved_digits  these, enlarged and moved about a frame of 28x28 pixels
  {", ".join(IDX_DATASETS)}
                from idx files on disk: --data-dir DIRECTORY (Debian's package
                dataset-fashion-mnist has them in
                /usr/share/datasets/fashion-mnist)
  NAME          any image-classification set of TensorFlow Datasets (mnist,
                cifar10, ...), downloaded on first use"""


class DatasetError(UsageError):
    """A data set that cannot be had; the message names what can."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}\n{CHOICES}")


def load(
    name: str,
    data_dir: pathlib.Path | None = None,
    cache_dir: pathlib.Path | None = None,
) -> ImageData:
    """Loads a data set into memory.

    Args:
        name: `digits`, `moved_digits` or a name that TFDS knows.
        data_dir: Directory of idx files, or of data that TFDS has prepared.
        cache_dir: Where TFDS keeps what it prepares.

    Raises:
        DatasetError: If it cannot be had.
    """
    if name not in EMBEDDED:
        try:
            return read(name, choose_builder(name, data_dir, cache_dir))
        except UnavailableError as error:
            raise DatasetError(str(error)) from error
    if data_dir is not None:
        raise DatasetError(f"{name} is embedded and takes no --data-dir.")
    return EMBEDDED[name]()


def load_chosen(options: argparse.Namespace) -> ImageData:
    """Loads what a command line asks for, see `arguments.image_parser`."""
    return load(options.dataset, options.data_dir, options.cache_dir)


def load_digits() -> ImageData:
    """Scikit-learn's digits, split once and for all."""
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise DatasetError(
            "digits needs scikit-learn: pip install '.[examples]'."
        ) from error
    digits = datasets.load_digits()
    images = digits.images.astype(np.uint8)[..., np.newaxis]
    train_images, test_images, train_labels, test_labels = (
        model_selection.train_test_split(
            images,
            digits.target,
            test_size=HELD_OUT_DIGITS,
            stratify=digits.target,
            random_state=0,
        )
    )
    return ImageData(
        "digits",
        Split(train_images, train_labels),
        Split(test_images, test_labels),
        num_classes=10,
        brightest=16,
    )


def moved_digits(
    examples: int = MOVED_DIGITS, held_out: int = HELD_OUT_MOVED_DIGITS
) -> ImageData:
    """The digits, enlarged to 20x20 and moved about a frame of 28x28."""
    digits = load_digits()
    random = np.random.RandomState(0)

    def move(split: Split, count: int) -> Split:
        chosen = random.randint(len(split), size=count)
        images = enlarged(split.x, ENLARGED)[chosen]
        return Split(moved(images, random), split.y[chosen])

    train, test = move(digits.train, examples), move(digits.test, held_out)
    return ImageData("moved_digits", train, test, num_classes=10)


def enlarged(digits: np.ndarray, side: int) -> np.ndarray:
    """Digits of 8x8 pixels, up to 16, in a larger size, up to 255."""
    large = tf.image.resize(digits / 16, (side, side), "bicubic").numpy()
    return np.round(255 * np.clip(large, 0, 1)).astype(np.uint8)


def moved(images: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Puts each image somewhere into a larger frame."""
    side = images.shape[1]
    frames = np.zeros((len(images), SIDE, SIDE, 1), np.uint8)
    room = SIDE - side + 1
    places = random.randint(room, size=(2, len(images)))
    for top in range(room):
        for left in range(room):
            there = (places[0] == top) & (places[1] == left)
            bottom, right = top + side, left + side
            frames[there, top:bottom, left:right] = images[there]
    return frames


EMBEDDED = {"digits": load_digits, "moved_digits": moved_digits}


def choose_builder(
    name: str, data_dir: pathlib.Path | None, cache_dir: pathlib.Path | None
) -> tfds.core.DatasetBuilder:
    if data_dir is None:
        return named_builder(name, cache_dir)
    if not data_dir.is_dir():
        raise DatasetError(f"{data_dir} is not a directory.")
    if (data_dir / name).is_dir():
        return named_builder(name, data_dir)
    if name not in IDX_DATASETS:
        raise DatasetError(
            f"{data_dir} holds no {name} that TFDS has prepared, and only "
            f"{', '.join(IDX_DATASETS)} are read from idx files."
        )
    try:
        config = IdxConfig.of(name, data_dir)
        return IdxImages(config=config, data_dir=cache_dir)
    except IdxError as error:
        raise DatasetError(f"{error}.") from error


def read(name: str, builder: tfds.core.DatasetBuilder) -> ImageData:
    """Prepares a data set of TFDS if needed and reads it into memory."""
    image, label = supervised_features(builder.info)
    if not (
        isinstance(image, tfds.features.Image)
        and isinstance(label, tfds.features.ClassLabel)
    ):
        raise DatasetError(f"{name} is not a set of images with one label.")
    prepare(name, builder)
    train, test = choose_splits(name, list(builder.info.splits))
    size = None if all(image.shape) else COMMON_SIZE
    if size:
        print(f"The images of {name} differ in size: resized to {size}.")
    return ImageData(
        name,
        read_split(builder.as_dataset(split=train, as_supervised=True), size),
        read_split(builder.as_dataset(split=test, as_supervised=True), size),
        num_classes=label.num_classes,
    )


def supervised_features(info: tfds.core.DatasetInfo) -> tuple:
    """What a model is to map from and to, as far as TFDS says."""
    keys = info.supervised_keys or ()
    if len(keys) != 2 or not all(key in info.features for key in keys):
        return None, None
    return tuple(info.features[key] for key in keys)


def choose_splits(name: str, splits: list[str]) -> tuple[str, str]:
    if "train" not in splits:
        raise DatasetError(f"{name} has no split to train on: {splits}.")
    for split in TEST_SPLITS:
        if split in splits:
            return "train", split
    print(f"{name} has no test split: the last fifth of train is held out.")
    return "train[:80%]", "train[80%:]"


def read_split(dataset: tf.data.Dataset, size: tuple[int, int] | None) -> Split:
    def resize(image: tf.Tensor, label: tf.Tensor) -> tuple:
        resized = tf.image.resize(image, size, antialias=True)
        return tf.cast(tf.round(resized), image.dtype), label

    if size:
        dataset = dataset.map(resize, num_parallel_calls=tf.data.AUTOTUNE)
    images, labels = zip(*tfds.as_numpy(dataset.batch(1000)), strict=True)
    return Split(np.concatenate(images), np.concatenate(labels))
