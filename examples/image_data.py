"""Image-classification data: embedded digits, idx files, any TFDS data set."""

import dataclasses
import difflib
import logging
import pathlib
import socket
import sys
import urllib.parse
import urllib.request

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from idx_images import IdxConfig, IdxError, IdxImages

IDX_DATASETS = ("fashion_mnist", "kmnist", "mnist")
HELD_OUT_DIGITS = 360
TEST_SPLITS = ("test", "validation")
# For data sets whose images differ in size.
COMMON_SIZE = (64, 64)

CHOICES = f"""\
Data sets to choose from:
  digits        1,797 images of 8x8 pixels, part of scikit-learn
  {", ".join(IDX_DATASETS)}
                from idx files on disk: --data-dir DIRECTORY (Debian's package
                dataset-fashion-mnist has them in
                /usr/share/datasets/fashion-mnist)
  NAME          any image-classification set of TensorFlow Datasets (mnist,
                cifar10, ...), downloaded on first use"""


class DatasetError(Exception):
    """A data set that cannot be had; the message names what can."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}\n{CHOICES}")


@dataclasses.dataclass(frozen=True)
class Split:
    """Images as bytes (or other unsigned integers) and their labels."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class ImageData:
    """A data set in memory; pixels go from 0 to `brightest`."""

    name: str
    train: Split
    test: Split
    num_classes: int
    brightest: int = 255

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.images.shape[1:]

    def train_batches(self, batch_size: int, seed: int) -> tf.data.Dataset:
        """Full batches in an order that only the seed and epoch determine."""
        order = tf.data.Dataset.range(len(self.train))
        order = order.shuffle(len(self.train), seed=seed)
        return self._batches(
            self.train, order.batch(batch_size, drop_remainder=True)
        )

    def test_batches(self, batch_size: int = 500) -> tf.data.Dataset:
        order = tf.data.Dataset.range(len(self.test))
        return self._batches(self.test, order.batch(batch_size))

    def _batches(self, split: Split, order: tf.data.Dataset) -> tf.data.Dataset:
        # The pixels stay bytes in memory: a quarter of float32.
        images, labels = tf.constant(split.images), tf.constant(split.labels)

        def batch(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            pixels = tf.cast(tf.gather(images, indices), tf.float32)
            return pixels / self.brightest, tf.gather(labels, indices)

        batches = order.map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE)


def load(
    name: str,
    data_dir: pathlib.Path | None = None,
    cache_dir: pathlib.Path | None = None,
) -> ImageData:
    """Loads a data set into memory.

    Args:
        name: `digits` or a name that TFDS knows.
        data_dir: Directory of idx files, or of data that TFDS has prepared.
        cache_dir: Where TFDS keeps what it prepares.

    Raises:
        DatasetError: If it cannot be had.
    """
    if name != "digits":
        quieten_tfds()
        return read(name, choose_builder(name, data_dir, cache_dir))
    if data_dir is not None:
        raise DatasetError("digits is embedded and takes no --data-dir.")
    return load_digits()


def quieten_tfds() -> None:
    """Leaves out warnings of the ordinary, and bars where nobody sees them."""
    for logger in ("absl", "urllib3"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()


def load_digits() -> ImageData:
    """Scikit-learn's digits, split once and for all."""
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise DatasetError(
            "digits needs scikit-learn: pip install 'tfkfac[examples]'."
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


def named_builder(
    name: str, directory: pathlib.Path | None
) -> tfds.core.DatasetBuilder:
    try:
        return tfds.builder(name, data_dir=directory)
    except Exception as error:  # each kind of set fails in its own way
        close = difflib.get_close_matches(name, tfds.list_builders(), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        reason = str(error).partition("\n")[0]
        raise DatasetError(
            f"TFDS cannot make a data set '{name}': {reason}{hint}"
        ) from error


def prepare(name: str, builder: tfds.core.DatasetBuilder) -> None:
    """Downloads and converts a data set, unless that has been done before."""
    if builder.is_prepared():
        return
    hosts = download_hosts(builder)
    if hosts and not can_reach(hosts[0]):
        raise DatasetError(
            f"{name} would have to be downloaded from {hosts[0]}, which "
            "cannot be reached from here."
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # network, checksums, disk, idx files, ...
        raise DatasetError(f"TFDS cannot prepare {name}: {error}") from error


def download_hosts(builder: tfds.core.DatasetBuilder) -> list[str]:
    urls = builder.url_infos or ()
    hosts = [urllib.parse.urlsplit(url).hostname for url in urls]
    return [host for host in hosts if host]


def can_reach(host: str) -> bool:
    """False without a network; TFDS itself retries for three minutes."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


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
