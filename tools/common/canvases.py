"""Digits on canvases, with classes of pixels.

A canvas of 48x48 pixels has noise and two digits of different sizes, in
different quarters.
"""

import numpy as np
import tensorflow as tf

from common.data import Data, Split

SIDE, CELL, DIGITS = 48, 24, 2
SIZES = (14, 18, 22)  # pixels of a digit
NOISE = 32  # the noise is below this value
INK = 96  # pixels above this value belong to a digit


def compose_all(source: Data, count: int) -> tuple[Split, Split]:
    """Compose `count` canvases for training, and a quarter for testing."""
    test = compose(source.test, count // 4, seed=1)
    return compose(source.train, count, seed=0), test


def compose(source: Split, count: int, seed: int) -> Split:
    """Compose canvases of bright digits on black, with one channel.

    The targets are the class of each pixel: 0 is the background, n + 1 the
    digit n.
    """
    random = np.random.default_rng(seed)
    resized = [_resize(source.x, size) for size in SIZES]
    images = random.integers(0, NOISE, (count, SIDE, SIDE, 1), np.uint8)
    labels = np.zeros((count, SIDE, SIDE), np.int32)
    chosen = random.integers(len(source), size=(count, DIGITS))
    classes = source.y[chosen].astype(np.int32)
    for canvas in range(count):
        cells = random.permutation((SIDE // CELL) ** 2)
        for digit, cell in enumerate(cells[:DIGITS]):
            index = random.integers(len(SIZES))
            size = SIZES[index]
            corner = CELL * np.array(divmod(cell, SIDE // CELL))
            top, left = corner + random.integers(CELL - size + 1, size=2)
            box = (canvas, slice(top, top + size), slice(left, left + size))
            pixels = resized[index][chosen[canvas, digit]]
            images[box] = np.maximum(images[box], pixels)
            labels[box][pixels[..., 0] > INK] = classes[canvas, digit] + 1
    return Split(images, labels)


def _resize(images: np.ndarray, size: int) -> np.ndarray:
    pixels = images * (255 / images.max())
    large = tf.image.resize(pixels, (size, size), "bicubic", antialias=True)
    return np.round(np.clip(large.numpy(), 0, 255)).astype(np.uint8)
