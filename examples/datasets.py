"""Train on a dataset of tensorflow-datasets, here one that is built locally.

    python examples/datasets.py
    python examples/datasets.py --name mnist  # downloads

The first command builds the digits of scikit-learn as a dataset on disk. The
pipeline is the usual one: shuffle, batch, prefetch.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
import tensorflow_datasets as tfds
from keras import layers
from sklearn.datasets import load_digits

import tfkfac


class LocalDigits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 digits of scikit-learn, of 8x8 pixels."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(8, 8, 1)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {
            "train": self._generate_examples(360, 1797),
            "test": self._generate_examples(0, 360),
        }

    def _generate_examples(self, first: int, end: int) -> Iterator[Any]:
        images, labels = load_digits(return_X_y=True)
        for i in range(first, end):
            image = images[i].reshape(8, 8, 1) * 15
            yield i, {"image": image.astype("uint8"), "label": int(labels[i])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--name", default="local_digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", help="of the prepared dataset")
    options = parser.parse_args()
    (train, test), info = tfds.load(
        options.name,
        split=["train", "test"],
        as_supervised=True,
        with_info=True,
        data_dir=options.directory,
    )

    def scale(image: tf.Tensor, label: tf.Tensor) -> Any:
        return tf.cast(image, tf.float32) / 255, label

    train = train.map(scale).cache().shuffle(10_000).batch(64).prefetch(1)
    model = keras.Sequential(
        [
            keras.Input(info.features["image"].shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(info.features["label"].num_classes),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfkfac.KFAC(), loss, metrics=["accuracy"])
    test = test.map(scale).batch(64)
    model.fit(train, epochs=options.epochs, validation_data=test, verbose=2)


if __name__ == "__main__":
    main()
