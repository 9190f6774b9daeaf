"""Detect a digit on a canvas: class, box and mask, as Mask R-CNN does.

    python examples/detection.py --optimizer kfac adam

A proposal is an inaccurate box of the digit. The backbone is trained before, to
classify digits. `skip_layers` leaves the neck to the rest optimizer.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import tfkfac

SIDE, DIGIT, BATCH = 24, 8, 32  # pixels, pixels, examples
LABELS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ["kfac", "adam"]
    parser.add_argument("--optimizer", nargs="+", choices=names, default=names)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    (x, y), test = load(1024, seed=0), load(256, seed=1)
    for name in options.optimizer:
        kfac = tfkfac.KFAC(0.1, skip_layers=["neck"])
        model = build(kfac if name == "kfac" else keras.optimizers.Adam(0.002))
        print(f"box and mask heads with {name}")
        model.fit(x, y, BATCH, options.epochs, verbose=2, validation_data=test)


def load(count: int, seed: int) -> tuple[Any, Any]:
    """Return canvases and proposals, and the targets of the three heads."""
    random, (x, y) = np.random.default_rng(seed), load_digits(return_X_y=True)
    images = random.uniform(0, 0.1, (count, SIDE, SIDE, 1)).astype("float32")
    chosen = random.integers(len(y), size=count)
    corners = random.integers(SIDE - DIGIT + 1, size=(count, 2))
    for image, digit, (top, left) in zip(images, chosen, corners, strict=True):
        image[top : top + 8, left : left + 8, 0] += x[digit].reshape(8, 8) / 16
    boxes = np.hstack([corners, corners + DIGIT]) / SIDE
    noise = 0.08 * DIGIT / SIDE * random.standard_normal(boxes.shape)
    proposals = np.clip(boxes + noise, 0, 1).astype("float32")
    masks = crop(np.float32(images > 0.4), proposals, 14).numpy() > 0.5
    targets = {"classes": y[chosen], "boxes": boxes - proposals, "masks": masks}
    return [images, proposals], targets


def crop(features: Any, boxes: Any, side: int) -> tf.Tensor:
    rows = tf.range(tf.shape(boxes)[0])
    return tf.image.crop_and_resize(features, boxes, rows, (side, side))


def build(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    convolve = {"padding": "same", "activation": "relu"}
    hidden = [layers.Conv2D(filters, 3, **convolve) for filters in (32, 64)]
    backbone = keras.Sequential([keras.Input((None, None, 1)), *hidden])
    head = [layers.GlobalMaxPooling2D(), layers.Dense(10)]
    classifier = keras.Sequential([backbone, *head])
    classifier.compile("adam", LABELS)
    classifier.fit(x.reshape(-1, 8, 8, 1) / 16, y, epochs=10, verbose=0)
    backbone.trainable = False
    inputs = keras.Input((SIDE, SIDE, 1)), keras.Input((4,))
    neck = layers.Conv2D(32, 1, name="neck", **convolve)
    align = layers.Lambda(lambda pair: crop(pair[0], pair[1], side=7))
    squares = align((neck(backbone(inputs[0])), inputs[1]))
    x = layers.Dense(128, "relu")(layers.Flatten()(squares))
    y = layers.Conv2D(32, 3, **convolve)(squares)
    y = layers.Conv2DTranspose(32, 2, 2, activation="relu")(y)
    outputs = {"classes": layers.Dense(10)(x), "boxes": layers.Dense(4)(x)}
    outputs["masks"] = layers.Conv2D(1, 1)(y)
    model = keras.Model(inputs, outputs)
    masks = keras.losses.BinaryCrossentropy(from_logits=True)
    losses = {"classes": LABELS, "boxes": "mse", "masks": masks}
    iou = keras.metrics.BinaryIoU([1], threshold=0, name="iou")
    model.compile(optimizer, losses, metrics={"masks": iou})
    return model


if __name__ == "__main__":
    main()
