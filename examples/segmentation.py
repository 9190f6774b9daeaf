"""Classify the pixels of two digits on a canvas, with a U-Net.

    python examples/segmentation.py --optimizer kfac adam

The metric is the mean overlap (IoU) of the ten digits' pixels.
"""

import argparse
from typing import Any

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import tfkfac

# Learning rates, which fall linearly to 0.
RATES = {"kfac": 0.1, "adam": 0.002}
SIDE, CELL, DIGIT, INK, BATCH = 48, 24, 16, 0.4, 32
CLASSES = 11  # the background and ten digits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=RATES, default=["kfac", "adam"])
    add("--examples", type=int, default=1024)
    add("--epochs", type=int, default=6)
    options = parser.parse_args()
    (x, y), test = canvases(options.examples, 0), canvases(256, 1)
    for name in options.optimizer:
        keras.utils.set_random_seed(0)
        rate = keras.optimizers.schedules.PolynomialDecay(
            RATES[name], options.epochs * -(-len(x) // BATCH), 0.0
        )
        adam = keras.optimizers.Adam(rate)
        model = build(adam if name == "adam" else tfkfac.KFAC(rate))
        print(f"U-Net with {name}")
        model.fit(x, y, BATCH, options.epochs, verbose=2, validation_data=test)


def canvases(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images of two digits, and the class of each pixel."""
    pixels, digits = load_digits(return_X_y=True)
    pixels = np.kron(pixels.reshape(-1, 8, 8) / 16, np.ones((1, 2, 2)))
    random = np.random.default_rng(seed)
    images = random.uniform(0, 0.1, (count, SIDE, SIDE, 1)).astype("float32")
    labels = np.zeros((count, SIDE, SIDE), "int32")
    for image, label in zip(images, labels, strict=True):
        for quarter in random.permutation(4)[:2]:
            corner = CELL * np.array(divmod(quarter, 2))
            top, left = corner + random.integers(CELL - DIGIT + 1, size=2)
            place = np.s_[top : top + DIGIT, left : left + DIGIT]
            digit = random.integers(len(digits))
            image[place][..., 0] += 0.9 * pixels[digit]
            label[place] = (pixels[digit] > INK) * (digits[digit] + 1)
    return images, labels


def build(optimizer: Any, filters: int = 16) -> keras.Model:
    """Return a compiled U-Net of Ronneberger et al., of three resolutions."""

    def convolutions(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.BatchNormalization(momentum=0.9, synchronized=True)(x)
            x = layers.ReLU()(x)
        return x

    inputs = keras.Input((SIDE, SIDE, 1))
    fine = convolutions(inputs, filters)
    middle = convolutions(layers.MaxPooling2D()(fine), 2 * filters)
    x = convolutions(layers.MaxPooling2D()(middle), 4 * filters)
    for skipped, width in ((middle, 2 * filters), (fine, filters)):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = convolutions(layers.Concatenate()([skipped, x]), width)
    model = keras.Model(inputs, layers.Conv2D(CLASSES, 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    iou = keras.metrics.IoU(
        CLASSES, range(1, CLASSES), "iou", sparse_y_pred=False
    )
    model.compile(optimizer, loss, metrics=[iou])
    return model


if __name__ == "__main__":
    main()
