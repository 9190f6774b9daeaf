"""Compress images of 784 pixels to 30 numbers, with a deep autoencoder.

    python examples/autoencoder.py --optimizer kfac adam
    python examples/autoencoder.py --dataset fashion_mnist

Without --dataset the images are scikit-learn's digits, enlarged and moved;
keras.datasets downloads the others. The error is the squared error of an image.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import tfkfac

# Learning rates, which fall linearly to 0.
RATES = {"kfac": 0.1, "kfac_empirical": 0.1, "adam": 0.002}
DATASETS = "moved_digits", "mnist", "fashion_mnist"
HIDDEN, CODE, BATCH = (1000, 500, 250), 30, 250


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=RATES, default=["kfac", "adam"])
    add("--dataset", choices=DATASETS, default="moved_digits")
    add("--epochs", type=int, default=4)
    options = parser.parse_args()
    if options.dataset == "moved_digits":
        images, _ = moved_digits(25_000)
        x, x_test = images[:20_000], images[20_000:]
    else:
        (x, _), (x_test, _) = getattr(
            keras.datasets, options.dataset
        ).load_data()
        x, x_test = (a.reshape(-1, 784) / np.float32(255) for a in (x, x_test))
    for name in options.optimizer:
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(
            optimizer=make_optimizer(name, options.epochs * len(x) // BATCH),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[error],
        )
        print(f"autoencoder of {options.dataset} with {name}")
        test = x_test, x_test
        model.fit(x, x, BATCH, options.epochs, verbose=2, validation_data=test)


def moved_digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return digits of 20x20 pixels at random places of 28x28, and labels."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16
    images = np.clip(tf.image.resize(images, (20, 20), "bicubic"), 0, 1)
    random = np.random.default_rng(0)
    chosen = random.integers(len(images), size=count)
    frames = np.zeros((count, 28, 28), "float32")
    for frame, digit in zip(frames, chosen, strict=True):
        top, left = random.integers(9, size=2)
        frame[top : top + 20, left : left + 20] = images[digit, ..., 0]
    return frames.reshape(-1, 784), labels[chosen]


def build() -> keras.Model:
    encoder = [layers.Dense(units, "tanh") for units in HIDDEN]
    decoder = [layers.Dense(units, "tanh") for units in reversed(HIDDEN)]
    body = [*encoder, layers.Dense(CODE), *decoder, layers.Dense(784)]
    return keras.Sequential([keras.Input((784,)), *body])


def error(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.sigmoid(logits) - y), -1)


def make_optimizer(name: str, steps: int) -> keras.optimizers.Optimizer:
    rate = keras.optimizers.schedules.PolynomialDecay(RATES[name], steps, 0.0)
    if name == "adam":
        return keras.optimizers.Adam(rate)
    empirical = name == "kfac_empirical"
    return tfkfac.KFAC(rate, fisher="empirical" if empirical else None)


if __name__ == "__main__":
    main()
