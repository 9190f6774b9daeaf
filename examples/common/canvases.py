"""Digits on canvases, with classes of pixels, boxes, and proposed boxes.

A canvas of 48x48 pixels has noise and two digits of different sizes, in
different quarters. A proposal is an inaccurate box of a digit, as of a region
proposal network. The targets of a proposal are the digit, the shift and scale
to the true box, and the mask of the digit's pixels.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from common.data import Data, Split

SIDE, CELL, DIGITS = 48, 24, 2
SIZES = (14, 18, 22)  # pixels of a digit
NOISE = 32  # the noise is below this value
INK = 96  # pixels above this value belong to a digit
MASK_SIDE = 28
JITTER = 0.08  # standard deviation of a proposal's edges, digit's side = 1


@dataclasses.dataclass(frozen=True)
class Canvases:
    """Canvases and their contents.

    Attributes:
        images: Pixels, `(canvases, 48, 48, 1)`.
        labels: Class of each pixel, `(canvases, 48, 48)`: 0 is the background,
            n + 1 the digit n.
        boxes: Top, left, bottom and right of each digit, with the side of the
            canvas as unit, `(canvases, 2, 4)`.
        classes: The digits, `(canvases, 2)`.
    """

    images: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray


def compose_all(source: Data, count: int) -> tuple[Canvases, Canvases]:
    """Compose `count` canvases for training, and a quarter for testing."""
    test = compose(source.test, count // 4, seed=1)
    return compose(source.train, count, seed=0), test


def compose(source: Split, count: int, seed: int) -> Canvases:
    """Compose canvases of bright digits on black, with one channel."""
    random = np.random.default_rng(seed)
    resized = [_resize(source.x, size) for size in SIZES]
    images = random.integers(0, NOISE, (count, SIDE, SIDE, 1), np.uint8)
    labels = np.zeros((count, SIDE, SIDE), np.int32)
    boxes = np.zeros((count, DIGITS, 4), np.float32)
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
            boxes[canvas, digit] = top, left, top + size, left + size
    return Canvases(images, labels, boxes / SIDE, classes)


def _resize(images: np.ndarray, size: int) -> np.ndarray:
    pixels = images * (255 / images.max())
    large = tf.image.resize(pixels, (size, size), "bicubic", antialias=True)
    return np.round(np.clip(large.numpy(), 0, 255)).astype(np.uint8)


# ------------------------------------------------------------------- proposals
def load_regions(source: Data, count: int) -> Data:
    """Return canvases with proposals as inputs, and their targets."""
    train, test = compose_all(source, count)
    return Data(propose(train, seed=2), propose(test, seed=3))


def propose(canvases: Canvases, seed: int) -> Split:
    """Return a proposal for each digit, with its targets."""
    random = np.random.default_rng(seed)
    boxes = canvases.boxes
    size = boxes[..., 2:] - boxes[..., :2]
    noise = JITTER * random.standard_normal(boxes.shape)
    moved = boxes + np.tile(size, 2) * noise
    proposals = moved.clip(0, 1).astype(np.float32)
    ink = (canvases.labels > 0).astype(np.float32)[..., np.newaxis]
    masks = crop(ink, proposals, MASK_SIDE).numpy() > 0.5
    return Split(
        {"images": canvases.images, "proposals": proposals},
        {
            "classes": canvases.classes,
            "boxes": _moves(proposals, boxes),
            "masks": masks.astype(np.float32),
        },
    )


def _moves(proposals: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return moves of the centres over the sides, and log ratios of sides."""
    old, new = (box[..., 2:] - box[..., :2] for box in (proposals, boxes))
    centres = boxes[..., :2] + new / 2 - proposals[..., :2] - old / 2
    return np.concatenate([centres / old, np.log(new / old)], -1)


def crop(features: tf.Tensor, boxes: tf.Tensor, side: int) -> tf.Tensor:
    """Resample each box of each image to a square.

    Matrix products have all derivatives, `tf.image.crop_and_resize` has first
    derivatives only.
    """
    rows, columns = (
        _weights(boxes[..., axis::2], features.shape[1 + axis], side)
        for axis in (0, 1)
    )
    return tf.einsum("bkih,bkjw,bhwc->bkijc", rows, columns, features)


def _weights(edges: tf.Tensor, size: int, side: int) -> tf.Tensor:
    """Return the bilinear weight of each pixel along one axis."""
    first, last = tf.split((size - 1.0) * edges, 2, -1)
    samples = first + (last - first) * tf.linspace(0.0, 1.0, side)
    pixels = tf.range(size, dtype=edges.dtype)
    return tf.nn.relu(1 - tf.abs(samples[..., tf.newaxis] - pixels))


class RegionAlign(keras.layers.Layer):
    """Resample the features of each box to a square, as Mask R-CNN does."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def call(self, features: tf.Tensor, boxes: tf.Tensor) -> tf.Tensor:
        return crop(features, boxes, self.side)
