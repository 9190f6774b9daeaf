"""Tiny images and a tiny network in place of the examples' own."""

from typing import Any

import keras
import numpy as np
import pytest

import image_data
import networks

SHAPE, CLASSES = (2, 2, 1), 3


def images(size: int, seed: int) -> image_data.Split:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size, *SHAPE)).astype(np.uint8)
    return image_data.Split(pixels, rng.integers(0, CLASSES, size))


def data() -> image_data.ImageData:
    return image_data.ImageData("tiny", images(40, 0), images(20, 1), CLASSES)


def network(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Of 19 weights."""
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(2, activation="tanh"),
            keras.layers.Dense(classes),
        ]
    )


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every data set and the default network tiny."""

    def load(*arguments: Any) -> image_data.ImageData:
        return data()

    monkeypatch.setattr(image_data, "load", load)
    monkeypatch.setitem(networks.NETWORKS, "mlp", network)
